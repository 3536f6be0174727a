#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sends thousands of requests through two prefill engines, one of which ends and restarts, and one decode engine, and
# compares all outputs with a single vLLM instance. Ctrl-C stops everything; the same command continues the run.
#
#   scripts/soak.sh [OPTION...]
#
#   --requests NUMBER       number of requests (10000); a larger number continues a finished run
#   --dir FOLDER            folder for all results (soak-results in the repository); a run there is continued
#   --fresh                 discard the run in the folder
#   --seed NUMBER           seed of all requests (0)
#   --concurrency NUMBER    number of requests in flight (12)
#   --signal KILL|TERM      signal that ends the prefill engine with TP 2 halfway (KILL)
#   --sample-seconds SECONDS
#                           time between two samples of all processes (3)
#
# scripts/setup_env.sh creates the environment, with its VENV and PYTHON. Exits with 0 only if no answer was wrong, no
# request hung, no block leaked, and requests failed only at the restart.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/stages.sh"
check_options "$@"

export VENV=${VENV:-$root/.venv}
"$root/scripts/setup_env.sh"
exec "$VENV/bin/python" "$root/scripts/soak.py" "$@"
