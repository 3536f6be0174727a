#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts the proxy: becomes `vllm-ascend-pd proxy`.
#
#   VLLM_HOST_IP=192.0.2.11 scripts/launch_proxy.sh [OPTION...] --prefill URL --decode URL [ARGUMENT of the proxy...]
#
# VLLM_HOST_IP is the address at which clients and decode engines reach this host. VENV is the environment with
# vllm-ascend-pd. `vllm-ascend-pd proxy --help` lists its arguments.
#
#   --dry-run        print the command, and start nothing
#   --env-file FILE  NAME=VALUE lines of the environment, mode 0600
set -euo pipefail
# shellcheck source=scripts/launch_common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/launch_common.sh"

read_options "$@"
need_address
run vllm-ascend-pd proxy --host "$VLLM_HOST_IP" --port 8000 "${arguments[@]}"
