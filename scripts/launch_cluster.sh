#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts a prefill/decode cluster on its hosts over ssh, in the foreground. Prints all logs side by side and says when
# the cluster serves. Ctrl-C ends all processes, and so does the end of one of them.
#
#   scripts/launch_cluster.sh HOSTS_YAML [--dry-run]
#
#   HOSTS_YAML              describes the cluster; docs/configuration.md lists all keys, examples/ has examples
#   --dry-run               print the commands for each host, and start nothing
#
# PYTHON (default: $VENV/bin/python, else python3) is a Python with this package; `python:` in hosts.yaml names the one
# on the hosts. ssh must not ask for passwords: use keys or an agent. The cluster serves once the proxy's /health, asked
# from here, is good. Logs go to standard output, all else to standard error; processes that print wait for both to be
# read. Exit codes: 2 for an invalid hosts.yaml, 1 if a process has ended, 130 after Ctrl-C or SIGTERM.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"

for argument in "$@"; do
  case $argument in
    -h | --help)
      comment "$0"
      exit
      ;;
    --stop) die "--stop was removed: press Ctrl-C where the launcher runs, or send it SIGTERM" ;;
    --detach) die "--detach was removed: run the launcher in tmux, with nohup, or as a service" ;;
  esac
done
find_python
check_python
exec "$python" -m vllm_ascend_pd.tools.launch.cluster --repository "$root" "$@"
