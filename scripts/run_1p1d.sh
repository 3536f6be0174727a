#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one prefill and one decode engine behind the proxy, compares them with a single vLLM instance, and shows where
# the time of the requests went.
#
#   scripts/run_1p1d.sh [OPTION...]
#
#   --device DEVICE         cpu (default) or npu
#   --emulate               with --device npu: vllm-ascend on emulated NPUs
#   --model FOLDER          a model of yours (default: a small one of random weights)
#   --prefill-tp SIZE       tensor-parallel size of the prefill engine (2)
#   --prefill-pp SIZE       its pipeline-parallel size (1)
#   --decode-tp SIZE        tensor-parallel size of the decode engine (1)
#   --decode-pp SIZE        its pipeline-parallel size (1)
#   --port PORT             the proxy's (8000); engines: +100, +200, and +14001, +14101 for KV
#   --timeline FOLDER       a picture of the longest request and its traces go to FOLDER/DATE-TIME (timeline)
#   --keep                  stay up until Ctrl-C
#   --prefill-args ARGUMENTS
#                           more arguments for the prefill engine's vLLM, as one word
#   --decode-args ARGUMENTS
#                           more for the decode engine's, and the single instance's
#   --start-seconds SECONDS
#                           how long an engine may take to start (600)
#
# With --device npu the environment is the active one, with vllm-ascend; else scripts/setup_env.sh makes it, and for
# emulated NPUs scripts/setup_npu_emulation.sh: VENV and PYTHON as there. Exits with 0 only if every output is equal,
# token by token.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/stages.sh"
check_options "$@"
check_choice --device cpu npu
check_folder --model
for option in --prefill-tp --prefill-pp --decode-tp --decode-pp; do check_whole "$option" 1; done
check_whole --port 1024 51000
check_folder --timeline new
check_seconds --start-seconds 1

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
