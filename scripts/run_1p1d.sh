#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One prefill and one decode engine behind the proxy, compared with a single vLLM instance; see --help.
# On NPUs the environment is the active one, with vllm-ascend; elsewhere scripts/setup_env.sh makes it, and for
# emulated NPUs scripts/setup_npu_emulation.sh.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

export VENV=${VENV:-$root/.venv}
options=" $* "
on_npu=
[[ $options =~ \ --device[=\ ]npu\  ]] && on_npu=1
if [[ $options == *" --emulate "* ]]; then
  if [[ ! $on_npu ]]; then
    echo "run_1p1d: --emulate goes with --device npu" >&2
    exit 2
  fi
  "$root/scripts/setup_npu_emulation.sh"
  export CANN_ON_HOST=1 # the emulated libraries, in this process and all it starts
  python=$VENV-npu/bin/python
elif [[ $on_npu ]]; then
  python=python3
else
  "$root/scripts/setup_env.sh"
  python=$VENV/bin/python
fi
exec "$python" "$root/scripts/run_1p1d.py" "$@"
