#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one node of a prefill engine on Ascend NPUs, or on the CPU for tests.
#
#   scripts/launch_prefill.sh --model PATH --device a2|a3|cpu --address IP [OPTION...] [-- VLLM_ARGUMENT...]
#
# For example, TP 16 on an A3 server:
#
#   scripts/launch_prefill.sh --model /models/DeepSeek-R1-W8A8 --device a3 --address 10.0.0.11 --tp 16 \
#     --decode-host 10.0.0.12 -- --enable-expert-parallel --quantization ascend --enforce-eager
#
# Option for prefill only:
#
#   --decode-host HOST      address, network (10.0.0.0/24) or name of a decode engine that this engine may write to;
#                           may be repeated (default: private networks, or any if --ticket-secret is given)
#
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"

launch_engine prefill 8100 256 "$@"
