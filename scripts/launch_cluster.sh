#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts a prefill/decode cluster on several hosts over ssh, waits until it serves, and stops it again; see --help.
#
#   scripts/launch_cluster.sh hosts.yaml [--detach | --stop | --dry-run]
#
# PYTHON (default: $VENV/bin/python, else python3) is a Python with this package in it; `python:` in hosts.yaml names
# the one on the hosts. ssh must get in without asking: keys, or an agent. examples/ has several hosts.yaml.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"

find_python
check_python
exec "$python" -m vllm_ascend_pd.launch.cluster --repository "$root" "$@"
