#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the benchmarks one after the other.
#
#   benchmarks/run_all.sh [--quick] [--check]
#
#   --quick   fewer sizes and rounds: meant for 10 minutes on two cores that do nothing else
#   --check   exit with 1 where a bar is missed
#
# VENV: the environment of scripts/setup_env.sh, by default .venv; those that need vllm-ascend run in VENV-npu, which
# scripts/setup_npu_emulation.sh makes. A benchmark that cannot run counts as failed. The exit code is 0 if none did,
# 130 after Ctrl-C, 143 after SIGTERM.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
VENV=${VENV:-$root/.venv}

quick=
check=()
while (($#)); do
  case $1 in
    --quick) quick=1 ;;
    --check) check=(--check) ;;
    -h | --help)
      sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit
      ;;
    *)
      echo "run_all: unknown option $1; see --help" >&2
      exit 2
      ;;
  esac
  shift
done

summary=()
failed=0
child=
finish() {
  local tries=300
  [[ $child ]] || return 0
  kill -TERM -- "-$child" 2>/dev/null || return 0 # interrupted: it is still running
  while ((tries--)) && kill -0 -- "-$child" 2>/dev/null; do
    sleep 0.1 # its engines are being stopped
  done
  kill -KILL -- "-$child" 2>/dev/null || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Each benchmark is a background job with a process group of its own: a signal reaches this script at once, and ends
# the whole group.
set -m
in_background() { # in_background COMMAND...
  local status=0
  "$@" </dev/null &
  child=$!
  wait "$child" || status=$?
  child=
  return "$status"
}

run() { # run ENVIRONMENT PROGRAM OPTION...
  local python=$1/bin/python program=$2 name=$2 start=$SECONDS verdict=ok
  shift 2
  [[ ${1-} != --npu ]] || name+=" --npu"
  printf '\n=== %s, load average %s\n' "$name" "$(cut -d' ' -f1 /proc/loadavg)"
  if [[ ! -x $python ]]; then
    printf 'no environment at %s: see --help\n' "${python%/bin/python}" >&2
    verdict="NOT RUN"
  elif ! in_background env CANN_ON_HOST=1 "$python" "$root/benchmarks/$program.py" "$@"; then
    verdict=FAILED
  fi
  [[ $verdict == ok ]] || failed=1
  summary+=("$(printf '%-8s %-16s %4d s' "$verdict" "$name" $((SECONDS - start)))")
}

# Shorter forms, where --quick asks for them.
in_short() { # in_short OPTION...
  short=()
  [[ -z $quick ]] || short=("$@")
}

in_short --seconds 0.3 --tokens 1024 4096
run "$VENV" regroup "${short[@]}" "${check[@]}"
in_short --mib 64 --rounds 5
run "$VENV" push "${short[@]}" "${check[@]}"
in_short --rounds 3
run "$VENV" overlap "${short[@]}" "${check[@]}"
in_short --requests 1 8 64 --engines 1 16 --rounds 2
run "$VENV" scale "${short[@]}" "${check[@]}"
in_short --steps 50
run "$VENV" waiting "${short[@]}" "${check[@]}"
in_short --requests 100 --seconds 4 --streams 500
run "$VENV" proxy_overhead "${short[@]}" "${check[@]}"
in_short --cases numbers text
run "$VENV" proxy_stalls "${short[@]}" "${check[@]}"
in_short --quick
run "$VENV" attacks "${short[@]}" "${check[@]}"
in_short --quick --pairs 1/1 --sides ours bare --rounds 3 --requests 16
run "$VENV" ttft "${short[@]}" "${check[@]}"
in_short --quick --models small --parts first
run "$VENV" who_computes "${short[@]}" "${check[@]}"
in_short --quick --sides "decode first" "long first" --loads alone
run "$VENV" reservation "${short[@]}" "${check[@]}"
in_short --rounds 3 --cases 32x32-contiguous {32x32,8x256}-scattered{,-tp2}
run "$VENV-npu" plan "${short[@]}" "${check[@]}"
run "$VENV-npu" descriptors "${check[@]}"
in_short --mib 16
run "$VENV-npu" push --npu "${short[@]}" "${check[@]}"
in_short --rounds 3
run "$VENV-npu" overlap --npu "${short[@]}" "${check[@]}"

printf '\n=== summary\n'
printf '%s\n' "${summary[@]}"
if ((failed)); then
  exit 1
fi
