#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one node of a prefill engine on Ascend NPUs, or on the CPU for tests. --help shows the options and the environment
# variables (vllm_ascend_pd/tools/launch/node.py).
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"
become vllm_ascend_pd.tools.launch.node prefill "$@"
