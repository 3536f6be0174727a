#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts a prefill/decode cluster on its hosts over ssh, waits until it serves, and stops it at Ctrl-C or when one of its
# processes ends.
#
#   scripts/launch_cluster.sh HOSTS_YAML [--detach | --stop | --dry-run]
#
#   HOSTS_YAML              the cluster: docs/configuration.md has all keys, examples/ has several
#   --detach                exit once it serves, and leave it running
#   --stop                  stop what runs of it, and exit
#   --dry-run               print what would run where, and start nothing
#
# PYTHON (default: $VENV/bin/python, else python3) is a Python with this package in it; `python:` in hosts.yaml names
# the one on the hosts. ssh must get in without asking: keys, or an agent. Exits with 2 for a hosts.yaml that cannot
# work, 1 where something failed, 130 after Ctrl-C.
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
