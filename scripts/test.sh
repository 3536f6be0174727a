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
#   --benchmarks    only the tests of benchmarks that take minutes each, which the other forms skip
#   --faults        only the fault injection in its long form, whose table is in docs/reliability.md; the other
#                   forms inject only a few of its faults. FAULTS_REPORT=FOLDER: also writes the table there
#   --hostile       only the hostile inputs to decoders and listeners in their long form: over 1,000,000 inputs
#   -k EXPRESSION   only the tests that match, as in pytest
#   -- ...          all further arguments go to each pytest run, for example: -- -x --durations=5
#
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

# Two stages with engines run beside the others, one after the other: engines mostly wait for each other, and leave half
# of two cores idle.
run_beside() { # run_beside NAME COMMAND...
  local name=$1 start=$SECONDS status=0
  shift
  "$@" &>"$scratch/$name.log" || status=$?
  echo "$((SECONDS - start)) $status" >"$scratch/$name.result"
}
engines_beside() {
  run_beside npu npu_tests -m "not long"
  run_beside soak run_pytest "$VENV" tests/soak
}
start_beside() {
  engines_beside </dev/null &
  beside=$!
}
end_beside() {
  wait "$beside" || true # each stage has a status of its own
  beside=
  show_beside npu "$npu_title"
  show_beside soak "soak, 300 requests"
}
show_beside() { # show_beside NAME TITLE
  local seconds=0 status=1 # a stage without a result was killed
  printf '\n=== %s\n' "$2"
  cat "$scratch/$1.log" || true
  [[ ! -e $scratch/$1.result ]] || read -r seconds status <"$scratch/$1.result"
  judge "$2" "$seconds" "$status"
}

run_pytest() { # run_pytest ENVIRONMENT PATH...
  local environment=$1
  shift
  # What vLLM remembers of models: two versions beside each other would write the same files, again and again.
  TMPDIR=$scratch VLLM_CACHE_ROOT="$scratch/${environment##*/}" \
    "$environment/bin/python" -m pytest --quiet --tb=short -p no:cacheprovider "${pytest_args[@]}" "$@"
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
npu_tests() {
  scripts/setup_npu_emulation.sh || return 1
  CANN_ON_HOST=1 run_pytest "$VENV-npu" tests/npu "$@"
}
npu_title="vllm-ascend and torch_npu on emulated CANN"

cd "$root"
setup=(--with-compat) # the NPU's tests compare with vLLM's CPU backend
[[ $mode != all && $mode != quick ]] || setup+=(--with-browser --with-prometheus)
[[ $mode != all && $mode != e2e && $mode != faults ]] || setup+=(--with-router)
run scripts/setup_env.sh "${setup[@]}"
case $mode in
  npu) stage "$npu_title" npu_tests ;;
  e2e) tests "end-to-end tests, long form" tests/e2e ;;
  benchmarks) tests "benchmarks, long form" tests/integration -m long ;;
  faults) tests "faults, long form" tests/faults ;;
  hostile) tests "hostile input, long form" tests/hostile --inputs 1100000 ;;
  *)
    [[ $mode == quick ]] || start_beside
    stage "ruff check" "$VENV/bin/ruff" check
    stage "ruff format" "$VENV/bin/ruff" format --check
    stage "mypy" "$VENV/bin/mypy"
    stage "import-linter" env PYTHONPATH="$root" "$VENV/bin/lint-imports" --no-cache
    tests_at_once "unit tests" tests/unit
    tests "NPU kernels on a CPU twin of AscendC" tests/ascendc_twin
    tests_at_once "integration tests" tests/integration -m "not long"
    PYTHONPATH="$VENV/vllm-0.23${PYTHONPATH:+:$PYTHONPATH}" \
      tests "tests that touch vLLM, with vLLM 0.23.0" tests/unit/test_{decode_scheduler,decode_scheduler_failures}.py \
        tests/unit/test_{prefill_scheduler,prefill_scheduler_preemption,prefill_scheduler_finish,transfer_span,windows}.py \
        tests/unit/test_{held_prompts,placed_by_scheduler,cached_tokens}.py \
        tests/integration/test_{decode_prefill_only,connector,context_parallelism,failed_forward,multi_connector,aggregation,engine_metrics}.py
    if [[ $mode == all ]]; then
      tests "end-to-end tests" tests/e2e -m "not long"
      tests "faults, short form" tests/faults -m "not long"
      end_beside
    fi
    # By itself: it takes thousands of ports, among them those that starting engines have chosen.
    tests "hostile input, short form" tests/hostile
    ;;
esac

printf '\n'
printf '%s\n' "${summary[@]}"
if ((failed)); then
  printf 'FAILED after %d s\n' "$SECONDS"
  exit 1
fi
printf 'passed in %d s\n' "$SECONDS"
