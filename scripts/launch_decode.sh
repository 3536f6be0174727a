#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one node of a decode engine on Ascend NPUs, or on the CPU for tests.
#
#   scripts/launch_decode.sh --model PATH --device a2|a3|cpu --address IP [OPTION...] [-- VLLM_ARGUMENT...]
#
# For example, DP 4 of TP 4 on an A3 server:
#
#   scripts/launch_decode.sh --model /models/DeepSeek-R1-W8A8 --device a3 --address 10.0.0.12 --tp 4 --dp 4 \
#     --metaserver http://10.0.0.10:8000 -- --enable-expert-parallel --quantization ascend
#
# Options for decode only:
#
#   --metaserver URL        a proxy that the engine may post tickets to; may be repeated (default: a proxy on this host)
#   --metaserver-token FILE file with the bearer token that the proxy requires
#   --kv-port PORT          port at which prefill engines ask for this engine's description (19000); each data-parallel
#                           replica uses the next port
#   --load-failure-policy fail|recompute
#                           whether a request whose KV does not arrive fails (default), or decode computes its prompt
#
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"

launch_engine decode 8200 600 "$@"
