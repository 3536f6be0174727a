#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Thousands of requests through two prefill engines, one of which is ended and comes back, and one decode engine, all
# compared with a single vLLM instance. Ctrl-C stops everything; the same command goes on from there.
#
#   scripts/soak.sh [OPTION...]
#
#   --requests NUMBER       how many (10000); more than before continues a finished run
#   --dir FOLDER            where everything is kept (soak-results in the repository); a run there is resumed
#   --fresh                 discard the run in the folder
#   --seed NUMBER           decides all requests (0)
#   --concurrency NUMBER    requests at a time (12)
#   --signal KILL|TERM      how the prefill engine with TP 2 ends in the middle (KILL)
#   --sample-seconds SECONDS
#                           between two samples of all processes (3)
#
# scripts/setup_env.sh makes the environment: VENV and PYTHON as there. Exits with 0 only if no answer was wrong, none
# hung, no block leaked, and nothing failed but at the restart.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
source "$root/scripts/stages.sh"
check_options "$@"
check_whole --requests 1
check_folder --dir new
check_whole --seed
check_whole --concurrency 1 256
check_choice --signal KILL TERM
check_seconds --sample-seconds 0.1

export VENV=${VENV:-$root/.venv}
"$root/scripts/setup_env.sh"
exec "$VENV/bin/python" "$root/scripts/soak.py" "$@"
