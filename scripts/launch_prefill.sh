#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one node of a prefill engine (P) on Ascend NPUs, or on the CPU for trying out.
#
#   scripts/launch_prefill.sh --model PATH --device a2|a3|cpu --address IP [OPTION...] [-- VLLM_ARGUMENT...]
#
# For example, TP 16 on an A3 server:
#
#   scripts/launch_prefill.sh --model /models/DeepSeek-R1-W8A8 --device a3 --address 10.0.0.11 --tp 16 \
#     --decode-host 10.0.0.12 -- --enable-expert-parallel --quantization ascend --enforce-eager
#
# Option of prefill alone:
#
#   --decode-host HOST      a decode engine's address, network (10.0.0.0/24) or name, to whom alone this one writes;
#                           may be repeated (default: private networks, or any if --ticket-secret is given)
#
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"

launch_engine prefill 8100 256 "$@"
