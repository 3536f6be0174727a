#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The first hours on NPUs: asks what only hardware can answer (docs/npu.md), step by step, and keeps what each step says.
#
#   scripts/first_hours.sh [OPTION...]
#
#   --results FOLDER        where the results go (first-hours-DATE-TIME)
#   --model FOLDER          a dense model, for example Qwen3-8B (default: a small model with random weights)
#   --moe FOLDER            a model with experts or MLA, for a last pair of engines (default: left out)
#   --peer HOST             address of a second server. Run this there with --steps peer and --peer THIS_SERVER once
#                           this one prints "peer:"
#   --other-mooncake FOLDER
#                           a second Mooncake (pip install --target FOLDER): the NPUs are tried with both
#   --steps NAMES           only these steps, separated by commas
#   --short                 only the steps that start no engines
#   --emulate               on emulated NPUs, where no time means anything
#
# A step that fails or takes longer than its limit is noted, and the next one runs. FOLDER/summary.json and the table at
# the end say what held. Exits with 0 only if every step that ran held. All steps together end within two and a half
# hours. The largest pair has TP 4 on prefill and TP 2 on decode, and needs six NPUs.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/stages.sh"
check_options "$@"

python=python3
if [[ -v given[--emulate] ]]; then
  export VENV=${VENV:-$root/.venv}
  "$root/scripts/setup_npu_emulation.sh" >&2
  export CANN_ON_HOST=1
  python=$VENV-npu/bin/python
fi
exec "$python" "$root/scripts/first_hours.py" "$@"
