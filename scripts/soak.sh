#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Thousands of requests through two prefill engines, one of which is killed and comes back, and one decode engine, all
# compared with a single vLLM instance; see --help. scripts/setup_env.sh makes the environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

export VENV=${VENV:-$root/.venv}
"$root/scripts/setup_env.sh"
exec "$VENV/bin/python" "$root/scripts/soak.py" "$@"
