#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets everything up and runs all checks and tests.
#
#   scripts/test.sh [--quick | --npu] [-k EXPRESSION] [-- PYTEST_ARGUMENT...]
#
#   --quick         leave out the end-to-end tests (real vLLM engines, most of the time) and the NPU's
#   --npu           only the NPU's: torch_npu and vllm-ascend, on emulated CANN libraries
#   -k EXPRESSION   only the tests that match, as in pytest
#   -- ...          everything after it goes to each pytest run, for example: -- -x --durations=5
#
# VENV and PYTHON as in scripts/setup_env.sh. Every stage runs even if an earlier one failed; the exit code is 0
# if none did, 130 after Ctrl-C.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export VENV=${VENV:-$root/.venv}

cpu=1
engines=1
npu=1
pytest_args=()
filtered=
while (($#)); do
  case $1 in
    --quick)
      engines=
      npu=
      ;;
    --npu) cpu= ;;
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
npu_setup=
finish() {
  local job tries
  for job in $child $npu_setup; do # interrupted: they are still running
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
stage() { # stage TITLE COMMAND...
  local title=$1 start=$SECONDS status=0 verdict=ok
  shift
  printf '\n=== %s\n' "$title"
  run "$@" || status=$?
  # pytest found no test: right for some stages of a filtered run.
  if ((status == 5)) && [[ $filtered ]]; then
    verdict="no test"
  elif ((status)); then
    verdict=FAILED
    failed=1
  fi
  summary+=("$(printf '%-8s %-48s %4d s' "$verdict" "$title" $((SECONDS - start)))")
}

tests() { # tests TITLE PATH...: with the interpreter of $VENV, or of $PYTEST_VENV
  local title=$1
  shift
  TMPDIR=$scratch stage "$title" \
    "${PYTEST_VENV:-$VENV}/bin/python" -m pytest --quiet -p no:cacheprovider "${pytest_args[@]}" "$@"
}

# The NPU's environment is set up beside the first stages: mostly it waits for downloads.
start_npu_setup() {
  (
    status=0
    scripts/setup_npu_emulation.sh &>"$scratch/npu-setup.log" </dev/null || status=$?
    echo "$status" >"$scratch/npu-setup.status"
  ) &
  npu_setup=$!
}
await_npu_setup() {
  until [[ -s $scratch/npu-setup.status ]]; do
    sleep 1
  done
  cat "$scratch/npu-setup.log"
  return "$(<"$scratch/npu-setup.status")"
}

cd "$root"
run scripts/setup_env.sh --with-compat # the NPU's tests compare with vLLM's CPU backend
[[ ! $npu ]] || start_npu_setup

if [[ $cpu ]]; then
  stage "ruff check" "$VENV/bin/ruff" check
  stage "ruff format" "$VENV/bin/ruff" format --check
  stage "mypy" "$VENV/bin/mypy"
  tests "unit tests" tests/unit
  tests "NPU kernels on a CPU twin of AscendC" tests/ascendc_twin
  tests "integration tests" tests/integration
  PYTHONPATH="$VENV/vllm-0.23${PYTHONPATH:+:$PYTHONPATH}" \
    tests "tests that touch vLLM, with vLLM 0.23.0" tests/unit/test_{consumer,producer}_scheduler.py \
      tests/integration/test_{connector,context_parallelism,multi_connector,aggregation}.py
  [[ ! $engines ]] || tests "end-to-end tests" tests/e2e
fi
if [[ $npu ]]; then
  stage "set-up of vllm-ascend on emulated CANN" await_npu_setup
  npu_setup=
  CANN_ON_HOST=1 PYTEST_VENV="$VENV-npu" tests "vllm-ascend and torch_npu on emulated CANN" tests/npu
fi

printf '\n'
printf '%s\n' "${summary[@]}"
if ((failed)); then
  printf 'FAILED after %d s\n' "$SECONDS"
  exit 1
fi
printf 'passed in %d s\n' "$SECONDS"
