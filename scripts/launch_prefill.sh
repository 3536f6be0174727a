#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one node of a prefill engine: sets the environment, and becomes `vllm serve`.
#
#   VLLM_HOST_IP=192.0.2.11 scripts/launch_prefill.sh [OPTION...] MODEL [ARGUMENT of vllm serve...]
#
# VLLM_HOST_IP is the address at which other hosts reach this one. ASCEND_RT_VISIBLE_DEVICES names the NPUs.
# VENV is the environment with vLLM. Your own variables and arguments win over those of the scripts.
#
#   --dry-run        print environment and command as a shell script, and start nothing
#   --env-file FILE  NAME=VALUE lines with secrets (VLLM_API_KEY, HF_TOKEN, ...), mode 0600
#   --cpu            vLLM's CPU backend, for tests
set -euo pipefail
# shellcheck source=scripts/launch_common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/launch_common.sh"

read_options "$@"
need_model
engine_environment 256
run vllm serve "${arguments[0]}" --host "$VLLM_HOST_IP" --port 8100 \
  --disable-access-log-for-endpoints /health,/metrics \
  --kv-transfer-config '{"kv_connector": "LayerwisePushConnector", "kv_role": "kv_producer"}' \
  "${arguments[@]:1}"
