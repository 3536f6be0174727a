#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one node of a decode engine (D) on Ascend NPUs, or on the CPU for trying out.
#
#   scripts/launch_decode.sh --model PATH --device a2|a3|cpu --address IP [OPTION...] [-- VLLM_ARGUMENT...]
#
# For example, DP 4 of TP 4 on an A3 server:
#
#   scripts/launch_decode.sh --model /models/DeepSeek-R1-W8A8 --device a3 --address 10.0.0.12 --tp 4 --dp 4 \
#     --metaserver http://10.0.0.10:8000 -- --enable-expert-parallel --quantization ascend
#
# Options of decode alone:
#
#   --metaserver URL        a proxy to which tickets may be posted; may be repeated (default: this host's own)
#   --metaserver-token FILE the bearer token that it asks for
#   --kv-port PORT          where prefill engines ask what this one looks like (19000); a port for each data-parallel
#                           replica from there on
#   --load-failure-policy fail|recompute
#                           what becomes of a request whose KV does not come: an error (default), or decode prefills
#
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"

launch_engine decode 8200 600 "$@"
