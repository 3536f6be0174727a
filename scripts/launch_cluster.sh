#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts a prefill/decode cluster on its hosts over ssh and waits until it serves. Stops it on Ctrl-C, or when one of
# its processes ends.
#
#   scripts/launch_cluster.sh HOSTS_YAML [--detach | --stop | --dry-run]
#
#   HOSTS_YAML              describes the cluster; docs/configuration.md lists all keys, examples/ has examples
#   --detach                exit once the cluster serves, and leave it running
#   --stop                  stop the running cluster and exit
#   --dry-run               print the commands for each host, and start nothing
#
# PYTHON (default: $VENV/bin/python, else python3) is a Python with this package; `python:` in hosts.yaml names the one
# on the hosts. ssh must not ask for passwords: use keys or an agent. Exit codes: 2 for an invalid hosts.yaml, 1 for a
# failure, 130 after Ctrl-C.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"

for argument in "$@"; do
  case $argument in
    -h | --help)
      comment "$0"
      exit
      ;;
  esac
done
find_python
check_python
exec "$python" -m vllm_ascend_pd.tools.launch.cluster --repository "$root" "$@"
