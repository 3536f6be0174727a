#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets everything up and runs all checks and tests.
#
#   scripts/test.sh [--quick | --npu | --e2e | --benchmarks | --faults | --hostile] [-k EXPRESSION]
#                   [-- PYTEST_ARGUMENT...]
#
#   --quick         skip the end-to-end tests (real vLLM engines, which take most of the time) and the NPU tests
#   --npu           only the NPU tests: torch_npu and vllm-ascend on emulated CANN libraries, with more pairs of
#                   parallel sizes
#   --e2e           only the end-to-end tests on vLLM's CPU backend, with more kinds of engines
#   --benchmarks    only the integration tests that the other forms skip: mostly benchmarks that take minutes each
#   --faults        only the fault injection in its long form, whose table is in docs/reliability.md; the other
#                   forms inject only a few of its faults. FAULTS_REPORT=FOLDER: also writes the table there
#   --hostile       only the hostile inputs to decoders and listeners in their long form: over 1,000,000 inputs
#   -k EXPRESSION   only the tests that match, as in pytest
#   -- ...          all further arguments go to each pytest run, for example: -- -x --durations=5
#
# As root on Debian or Ubuntu, it installs missing packages by apt-get (--install-system-packages of the set-up).
# VENV and PYTHON are as in scripts/setup_env.sh. Every stage runs even if an earlier one failed. The exit code is 0 if
# all passed, 130 after Ctrl-C.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
export VENV=${VENV:-$root/.venv}

mode=all
pytest_args=()
filtered=
while (($#)); do
  case $1 in
    --quick | --npu | --e2e | --benchmarks | --faults | --hostile)
      [[ $mode == all || $mode == "${1#--}" ]] || {
        echo "test: --$mode and $1: which?" >&2
        exit 2
      }
      mode=${1#--}
      ;;
    -k)
      (($# > 1)) || {
        echo "test: -k needs an expression; see --help" >&2
        exit 2
      }
      pytest_args+=(-k "$2")
      filtered=1
      shift
      ;;
    --)
      shift
      pytest_args+=("$@")
      (($# == 0)) || filtered=1
      break
      ;;
    -h | --help)
      sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit
      ;;
    *)
      echo "test: unknown option $1; see --help" >&2
      exit 2
      ;;
  esac
  shift
done

scratch=$(mktemp -d "${TMPDIR:-/tmp}/vllm-ascend-pd-test.XXXXXX")
child=
beside=
finish() {
  local job tries
  for job in $child $beside; do # interrupted: they are still running
    kill -TERM -- "-$job" 2>/dev/null || continue
    tries=300
    while ((tries--)) && kill -0 -- "-$job" 2>/dev/null; do
      sleep 0.1 # its engines are being stopped
    done
    kill -KILL -- "-$job" 2>/dev/null || true
  done
  rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Each stage is a background job with a process group of its own: Ctrl-C reaches this script at once, and ends
# the whole group.
set -m
run() { # run COMMAND...
  local status=0
  "$@" </dev/null &
  child=$!
  wait "$child" || status=$?
  child=
  return "$status"
}

summary=()
failed=0
judge() { # judge TITLE SECONDS STATUS
  local verdict=ok
  # pytest found no test: right for some stages of a filtered run.
  if (($3 == 5)) && [[ $filtered ]]; then
    verdict="no test"
  elif (($3)); then
    verdict=FAILED
    failed=1
  fi
  summary+=("$(printf '%-8s %-48s %4d s' "$verdict" "$1" "$2")")
}

stage() { # stage TITLE COMMAND...
  local title=$1 start=$SECONDS status=0
  shift
  printf '\n=== %s\n' "$title"
  run "$@" || status=$?
  judge "$title" $((SECONDS - start)) "$status"
}

# Long stages that either of two lanes takes, whichever is free. Engines mostly wait for each other, and leave half of
# two cores idle.
declare -A titles=(
  [npu]="vllm-ascend and torch_npu on emulated CANN"
  [e2e]="end-to-end tests"
  [faults]="faults, short form"
  [hostile]="hostile input, short form"
  [soak]="soak, 200 requests"
)
long_stages=(npu e2e faults hostile soak)
run_long_stage() {
  case $1 in
    npu) npu_tests -m "not long" ;;
    e2e) run_pytest "$VENV" tests/e2e -m "not long" ;;
    faults) run_pytest "$VENV" tests/faults -m "not long" ;;
    hostile) hostile_tests ;;
    soak) run_pytest "$VENV" tests/soak ;;
  esac
}
claim() { # claim NAME: fails if the other lane has it, or if it must run by itself
  [[ $1 != hostile || $by_itself ]] || has_own_network || return 1
  mkdir "$scratch/$1.claimed" 2>/dev/null
}
by_itself=

long_stages_beside() {
  local name start status
  for name in "${long_stages[@]}"; do
    claim "$name" || continue
    start=$SECONDS status=0
    run_long_stage "$name" &>"$scratch/$name.log" || status=$?
    echo "$((SECONDS - start)) $status" >"$scratch/$name.result"
  done
}
start_beside() {
  long_stages_beside </dev/null &
  beside=$!
}
end_beside() {
  local name seconds status
  for name in "${long_stages[@]}"; do
    ! claim "$name" || stage "${titles[$name]}" run_long_stage "$name"
  done
  wait "$beside" || true # each stage has a status of its own
  beside=
  for name in "${long_stages[@]}"; do
    [[ -e $scratch/$name.log ]] || continue
    seconds=0 status=1 # a stage without a result was killed
    printf '\n=== %s\n' "${titles[$name]}"
    cat "$scratch/$name.log"
    [[ ! -e $scratch/$name.result ]] || read -r seconds status <"$scratch/$name.result"
    judge "${titles[$name]}" "$seconds" "$status"
  done
}

wrapper=() # a command in front of pytest
run_pytest() { # run_pytest ENVIRONMENT PATH...
  local environment=$1 options=(--quiet --tb=short -p no:cacheprovider --durations=10 --durations-min=5)
  shift
  # What vLLM remembers of models: two versions beside each other would write the same files, again and again.
  TMPDIR=$scratch VLLM_CACHE_ROOT="$scratch/${environment##*/}" \
    "${wrapper[@]}" "$environment/bin/python" -m pytest "${options[@]}" "${pytest_args[@]}" "$@"
}
# Mostly waiting: several at a time.
tests_at_once() { # tests_at_once TITLE PATH...
  tests "$@" --numprocesses 4 --dist worksteal
}
tests() { # tests TITLE PATH...
  local title=$1
  shift
  stage "$title" run_pytest "$VENV" "$@"
}
# Unit and integration tests that import vLLM or connector/, or a helper of the tests that does.
tests_that_touch_vllm() {
  local imports='^ *(from|import) (vllm|vllm_ascend_pd\.connector)[. ]' helpers
  helpers=$(grep -rlE "$imports" tests/harness tests/unit tests/integration --include='*.py' --exclude='test_*' \
    --exclude=conftest.py | sed -E 's|.*/(.*)\.py|\1|' | paste -sd '|')
  grep -rlE "$imports|^ *(from|import) (harness\.)?($helpers) " tests/unit tests/integration --include='test_*.py' | sort
}
npu_tests() {
  scripts/setup_npu_emulation.sh --install-system-packages || return 1
  until [[ -e $scratch/set_up ]]; do sleep 1; done # the other environment, which these tests use, too
  CANN_ON_HOST=1 run_pytest "$VENV-npu" tests/npu "$@"
}
# Hostile input takes thousands of ports, among them those that starting engines have chosen. So it runs in a network of
# its own, which has a loopback device only, or by itself where the machine does not allow that.
own_network=(
  unshare --net "$VENV/bin/python" -c '
import fcntl, os, socket, struct, sys

SIOCSIFFLAGS, IFF_UP = 0x8914, 1
fcntl.ioctl(socket.socket(), SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
os.execvp(sys.argv[1], sys.argv[1:])'
)
has_own_network() {
  "${own_network[@]}" true &>/dev/null
}
hostile_tests() {
  local wrapper=()
  ! has_own_network || wrapper=("${own_network[@]}")
  run_pytest "$VENV" tests/hostile
}

cd "$root"
setup=(--install-system-packages --with-compat) # the NPU's tests compare with vLLM's CPU backend
[[ $mode != all && $mode != quick ]] || setup+=(--with-browser --with-prometheus)
[[ $mode != all && $mode != e2e && $mode != faults ]] || setup+=(--with-router)
[[ $mode != all ]] || start_beside # with the NPU's environment
run scripts/setup_env.sh "${setup[@]}"
: >"$scratch/set_up"
case $mode in
  npu) stage "${titles[npu]}" npu_tests ;;
  e2e) tests "end-to-end tests, long form" tests/e2e ;;
  benchmarks) tests "integration tests, long form" tests/integration -m long ;;
  faults) tests "faults, long form" tests/faults ;;
  hostile) tests "hostile input, long form" tests/hostile --inputs 1100000 ;;
  *)
    stage "ruff check" "$VENV/bin/ruff" check
    stage "ruff format" "$VENV/bin/ruff" format --check
    stage "mypy" "$VENV/bin/mypy"
    stage "import-linter" env PYTHONPATH="$root" "$VENV/bin/lint-imports" --no-cache
    tests_at_once "unit tests" tests/unit
    tests "NPU kernels on a CPU twin of AscendC" tests/ascendc_twin
    tests_at_once "integration tests" tests/integration -m "not long"
    mapfile -t touching < <(tests_that_touch_vllm)
    PYTHONPATH="$VENV/vllm-0.23${PYTHONPATH:+:$PYTHONPATH}" \
      tests_at_once "tests that touch vLLM, with vLLM 0.23.0" "${touching[@]}" -m "not long"
    [[ $mode == quick ]] || end_beside
    by_itself=1
    ! claim hostile || stage "${titles[hostile]}" run_long_stage hostile
    ;;
esac

printf '\n'
printf '%s\n' "${summary[@]}"
if ((failed)); then
  printf 'FAILED after %d s\n' "$SECONDS"
  exit 1
fi
printf 'passed in %d s\n' "$SECONDS"
