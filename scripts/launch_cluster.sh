#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts a prefill/decode cluster on its hosts over ssh, in the foreground (vllm_ascend_pd/tools/launch/cluster.py).
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/launch_common.sh"
become vllm_ascend_pd.tools.launch.cluster --repository "$root" "$@"
