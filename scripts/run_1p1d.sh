#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One prefill and one decode engine behind the proxy, compared with a single vLLM instance; see --help.
# On NPUs the environment is the active one, with vllm-ascend; elsewhere scripts/setup_env.sh makes it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ " $* " =~ \ --device[=\ ]npu\  ]]; then
  python=python3
else
  export VENV=${VENV:-$root/.venv}
  "$root/scripts/setup_env.sh"
  python=$VENV/bin/python
fi
exec "$python" "$root/scripts/run_1p1d.py" "$@"
