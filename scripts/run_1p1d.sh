#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one prefill and one decode engine behind the proxy, compares them with a single vLLM instance, and shows where
# the requests spend their time.
#
#   scripts/run_1p1d.sh [OPTION...]
#
#   --device DEVICE         cpu (default) or npu
#   --emulate               with --device npu: vllm-ascend on emulated NPUs
#   --model FOLDER          model to use (default: a small model with random weights)
#   --prefill-tp SIZE       tensor-parallel size of the prefill engine (2)
#   --prefill-pp SIZE       pipeline-parallel size of the prefill engine (1)
#   --decode-tp SIZE        tensor-parallel size of the decode engine (1)
#   --decode-pp SIZE        pipeline-parallel size of the decode engine (1)
#   --port PORT             port of the proxy (8000); the engines use +100 and +200, and +14001 and +14101 for KV
#   --timeline FOLDER       folder for a picture of the longest request and its traces, as FOLDER/DATE-TIME (timeline)
#   --prompt-tokens LENGTHS
#                           lengths of the prompts, separated by commas (16,128,500,1000,2000)
#   --verify-kv             compare what decode receives with what prefill computed
#   --graphs                on NPUs, prefill and decode capture graphs
#   --keep                  keep running until Ctrl-C
#   --prefill-args ARGUMENTS
#                           more arguments of `vllm serve` for the prefill engine, as one word
#   --decode-args ARGUMENTS
#                           the same for the decode engine and the single instance
#   --start-seconds SECONDS
#                           timeout for the start of an engine (600)
#
# With --device npu the script uses the active environment, which must have vllm-ascend. Otherwise scripts/setup_env.sh
# creates one, or scripts/setup_npu_emulation.sh for emulated NPUs, with their VENV and PYTHON. Exits with 0 only if all
# outputs are equal, token by token.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/stages.sh"
check_options "$@"

export VENV=${VENV:-$root/.venv}
device=${given[--device]:-cpu}
if [[ -v given[--emulate] ]]; then
  [[ $device == npu ]] || refuse "--emulate goes with --device npu"
  "$root/scripts/setup_npu_emulation.sh"
  export CANN_ON_HOST=1 # the emulated libraries, in this process and all it starts
  python=$VENV-npu/bin/python
elif [[ $device == npu ]]; then
  python=python3
  # What it needs is looked for too: the package itself is found in the current folder.
  "$python" -c 'import sys, importlib.util as i
sys.exit(not all(map(i.find_spec, ("vllm_ascend_pd", "httpx", "msgspec", "psutil", "rich", "typer"))))' || {
    echo "run_1p1d: vllm-ascend-pd is not installed for $(command -v "$python" || echo "$python"): activate the" \
      "environment that has it, with vllm-ascend (\`source .../bin/activate\`)" >&2
    exit 1
  }
else
  "$root/scripts/setup_env.sh"
  python=$VENV/bin/python
fi
exec "$python" "$root/scripts/run_1p1d.py" "$@"
