#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets everything up and runs all checks and tests.
#
#   scripts/test.sh [--quick | --npu | --e2e | --benchmarks | --faults | --hostile | --simulation
#                    | --mutants] [-k EXPRESSION] [--durations FILE] [-- PYTEST_ARGUMENT...]
#
#   --quick         skip the end-to-end tests (real vLLM engines, which take most of the time), the NPU tests, faults and
#                   the simulation
#   --npu           only the NPU tests: torch_npu and vllm-ascend on emulated CANN libraries, with more pairs of
#                   parallel sizes
#   --e2e           only the end-to-end tests on vLLM's CPU backend, with more kinds of engines. Then 200 requests of the
#                   soak. The other forms have no soak
#   --benchmarks    only benchmarks/run_all.sh --quick, and the unit and integration tests that the other forms skip
#   --faults        only the fault injection in its long form, whose table is in docs/reliability.md; the other
#                   forms inject only a few of its faults. FAULTS_REPORT=FOLDER: also writes the table there
#   --hostile       only the hostile inputs to decoders and listeners in their long form: over 1,000,000 inputs
#   --simulation    only the simulation (docs/reliability.md), for half an hour of one core, with the date as its first
#                   seed. SIMULATION_SEED=NUMBER: with this one. SIMULATION_SECONDS=NUMBER: for another time
#   --mutants       only takes guards out of the product, one at a time: quick tests or the simulation must notice each
#   -k EXPRESSION   only the tests that match, as in pytest
#   --durations FILE
#                   writes the time of each stage there, as benchmarks/results/ci.json has it
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
durations=
while (($#)); do
  case $1 in
    --quick | --npu | --e2e | --benchmarks | --faults | --hostile | --simulation | --mutants)
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
    --durations)
      (($# > 1)) || {
        echo "test: --durations needs a file; see --help" >&2
        exit 2
      }
      durations=$(realpath "$2")
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
beside=() # lanes beside this one
finish() {
  local job tries
  for job in $child "${beside[@]}"; do # interrupted: they are still running
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

# Each of some thousand processes would compile the package's and the tests' modules anew.
unset PYTHONDONTWRITEBYTECODE

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
rows=() # of --durations
failed=0
judge() { # judge TITLE SECONDS STATUS [LANE]
  local verdict=ok
  # pytest found no test: right for some stages of a filtered run.
  if (($3 == 5)) && [[ $filtered ]]; then
    verdict="no test"
  elif (($3)); then
    verdict=FAILED
    failed=1
  fi
  summary+=("$(printf '%-8s %-48s %4d s' "$verdict" "$1" "$2")")
  rows+=("$(printf '    {"stage": "%s", "lane": %d, "seconds": %d, "result": "%s"}' "$1" "${4:-1}" "$2" "$verdict")")
}

stage() { # stage TITLE COMMAND...
  local title=$1 start=$SECONDS status=0
  shift
  printf '\n=== %s\n' "$title"
  run "$@" || status=$?
  judge "$title" $((SECONDS - start)) "$status"
}

# Long stages, which the next free lane takes, the longest first. Two lanes run beside the short stages, and two more
# when those are done: engines mostly wait for each other, and leave half of two cores idle.
declare -A titles=(
  [npu]="torch_npu on emulated CANN"
  [npu-e2e]="vllm-ascend engines on emulated CANN"
  [npu-tools]="doctor, wheels and builds on emulated CANN"
  [npu-contract]="what is relied on in vllm-ascend"
  [e2e]="end-to-end tests"
  [faults]="faults, short form"
  [hostile]="hostile input, short form"
  [simulation]="simulation, 10,000 requests"
  [vllm-0.23]="tests that run vLLM, with vLLM 0.23.0"
  [vllm-newer]="what differs in vLLM 0.32.0 and 0.33.0"
)
long_stages=(npu e2e npu-e2e npu-tools simulation hostile vllm-0.23 vllm-newer faults npu-contract)
npu_tools=(tests/npu/test_{doctor_hardware,first_hours,kernel_builds,mooncake_versions}.py)
not_npu_tools=()
for path in tests/npu/{e2e,contract} "${npu_tools[@]}"; do not_npu_tools+=(--ignore "$path"); done
run_long_stage() {
  case $1 in
    npu) npu_tests tests/npu "${not_npu_tools[@]}" -m "not long" ;;
    npu-tools) npu_tests "${npu_tools[@]}" -m "not long" ;;
    npu-contract) npu_tests tests/npu/contract -m "not long" ;;
    npu-e2e) npu_tests tests/npu/e2e -m "not long" ;;
    e2e) run_pytest "$VENV" tests/e2e -m "not long" ;;
    faults) run_pytest "$VENV" tests/faults -m "not long" ;;
    hostile) hostile_tests ;;
    simulation) run_pytest "$VENV" tests/simulation -m "not long" ;;
    vllm-0.23) older_vllm_tests ;;
    vllm-newer) newer_vllm_tests ;;
  esac
}
await_set_up() {
  until [[ -e $scratch/set_up ]]; do sleep 1; done
}
claim() { # claim NAME: fails if another lane has it, or if it must run by itself
  [[ $1 != hostile || $by_itself ]] || has_own_network || return 1
  mkdir "$scratch/$1.claimed" 2>/dev/null
}
by_itself=

long_stages_beside() { # long_stages_beside LANE
  local name start status
  for name in "${long_stages[@]}"; do
    claim "$name" || continue
    [[ $name == npu* ]] || await_set_up # npu_tests sets more up first
    start=$SECONDS status=0
    run_long_stage "$name" &>"$scratch/$name.log" || status=$?
    echo "$((SECONDS - start)) $status $1" >"$scratch/$name.result"
  done
}
start_beside() {
  long_stages_beside $((${#beside[@]} + 2)) </dev/null &
  beside+=($!)
}
end_beside() {
  local name seconds status lane
  start_beside
  for name in "${long_stages[@]}"; do
    ! claim "$name" || stage "${titles[$name]}" run_long_stage "$name"
  done
  wait "${beside[@]}" || true # each stage has a status of its own
  beside=()
  for name in "${long_stages[@]}"; do
    [[ -e $scratch/$name.log ]] || continue
    seconds=0 status=1 lane=0 # a stage without a result was killed
    printf '\n=== %s\n' "${titles[$name]}"
    cat "$scratch/$name.log"
    [[ ! -e $scratch/$name.result ]] || read -r seconds status lane <"$scratch/$name.result"
    judge "${titles[$name]}" "$seconds" "$status" "$lane"
  done
}

wrapper=() # a command in front of pytest
run_pytest() { # run_pytest ENVIRONMENT PATH...
  local environment=$1 options=(--quiet --tb=short -p no:cacheprovider --durations=10 --durations-min=5)
  shift
  # What vLLM remembers of models: two versions beside each other would write the same files, again and again.
  TMPDIR=$scratch VLLM_CACHE_ROOT="$scratch/${vllm:-${environment##*/}}" \
    "${wrapper[@]}" "$environment/bin/python" -m pytest "${options[@]}" "${pytest_args[@]}" "$@"
}
# Mostly waiting: several at a time.
at_once=(--numprocesses 3 --dist worksteal)
tests() { # tests TITLE PATH...
  local title=$1
  shift
  stage "$title" run_pytest "$VENV" "$@"
}
# Unit and integration tests that run code of vLLM which differs between its versions: they import it or connector/, or
# a helper of the tests that does. Requests and what schedulers say are data, and the same in all versions.
tests_that_run_vllm() {
  local runs='vllm\.(config|distributed|entrypoints|model|multimodal|plugins|v1\.(attention|kv|worker|core\.(kv|sched\.sch)))'
  local helpers imports="^ *(from|import) $runs"
  helpers=$(grep -rlE "$imports" tests/harness tests/unit tests/integration --include='*.py' --exclude='test_*' \
    --exclude=conftest.py | sed -E 's|.*/(.*)\.py|\1|' | paste -sd '|')
  grep -rlE "$imports|^ *(from|import) (vllm_ascend_pd\.connector[. ]|(harness\.)?($helpers) )" tests/unit \
    tests/integration --include='test_*.py' | sort
}
older_vllm_tests() {
  local running vllm=vllm-0.23
  mapfile -t running < <(tests_that_run_vllm)
  PYTHONPATH="$VENV/$vllm${PYTHONPATH:+:$PYTHONPATH}" \
    run_pytest "$VENV" "${running[@]}" -m "not long" --numprocesses 2 --dist worksteal # a third would mostly import
}
# Tests of what another vLLM does otherwise: decode's queues, Model Runner V2's connector classes, and lost steps.
newer_vllm_tests() {
  local vllm code status=0 differing=(
    tests/integration/test_{decode_pause,decode_pressure,decode_pressure_at_random,decode_newer}.py
    tests/integration/test_{decode_long_prompts,runner_v2}.py
    tests/unit/test_lost_steps.py
    tests/simulation/test_lost_steps.py
  )
  for vllm in vllm-0.32 vllm-0.33; do
    code=0
    PYTHONPATH="$VENV/$vllm${PYTHONPATH:+:$PYTHONPATH}" run_pytest "$VENV" "${differing[@]}" -m "not long" || code=$?
    ((code == 0)) || status=$code
  done
  return "$status"
}
npu_tests() {
  flock "$scratch/npu.lock" scripts/setup_npu_emulation.sh || return 1 # one lane at a time
  await_set_up # of the other environment, which these tests use, too
  CANN_ON_HOST=1 run_pytest "$VENV-npu" "$@"
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
setup=(--with-compat) # the NPU's tests compare with vLLM's CPU backend
[[ $mode != all && $mode != quick ]] || setup+=(--with-programs)
[[ $mode != all && $mode != e2e && $mode != faults ]] || setup+=(--with-router)
if [[ $mode == all ]]; then
  start_beside # with the NPU's environment
  start_beside
fi
run scripts/setup_env.sh "${setup[@]}"
judge "set-up" "$SECONDS" 0
: >"$scratch/set_up"
case $mode in
  npu) # each a process of its own: what vLLM's engines need imported or set, other tests must not have
    stage "${titles[npu-contract]}, long form" npu_tests tests/npu/contract
    stage "${titles[npu-tools]}, long form" npu_tests "${npu_tools[@]}"
    stage "${titles[npu]}, long form" npu_tests tests/npu "${not_npu_tools[@]}"
    stage "${titles[npu-e2e]}, long form" npu_tests tests/npu/e2e
    ;;
  e2e)
    tests "end-to-end tests, long form" tests/e2e
    tests "soak, 200 requests" tests/soak -m "not long"
    ;;
  benchmarks)
    stage "emulated CANN" scripts/setup_npu_emulation.sh
    stage "benchmarks, quick form" benchmarks/run_all.sh --quick
    tests "unit and integration tests, long form" tests/unit tests/integration -m long
    ;;
  faults) tests "faults, long form" tests/faults ;;
  hostile) tests "hostile input, long form" tests/hostile --inputs 1100000 ;;
  simulation)
    export SIMULATION_SEED=${SIMULATION_SEED:-$(date +%Y%m%d)000000}
    tests "simulation from seed $SIMULATION_SEED" tests/simulation -m long
    ;;
  mutants)
    export PYTHONPATH="$root:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
    stage "guards that are taken out" "$VENV/bin/python" -m simulation.try_mutants "${pytest_args[@]}"
    ;;
  *)
    stage "ruff check" "$VENV/bin/ruff" check
    stage "ruff format" "$VENV/bin/ruff" format --check
    stage "mypy" "$VENV/bin/mypy"
    stage "import-linter" env PYTHONPATH="$root" "$VENV/bin/lint-imports" --no-cache
    # In one run: each process imports vLLM and collects all tests, in 10 s and more.
    tests "unit, integration and kernel tests" tests/unit tests/ascendc_twin tests/integration -m "not long" "${at_once[@]}"
    if [[ $mode == quick ]]; then
      stage "${titles[vllm-0.23]}" older_vllm_tests
      stage "${titles[vllm-newer]}" newer_vllm_tests
    else
      end_beside
    fi
    by_itself=1
    ! claim hostile || stage "${titles[hostile]}" run_long_stage hostile
    ;;
esac

if [[ $durations ]]; then
  {
    printf '{\n  "date": "%s",\n  "machine": "%d cores",\n  "seconds": %d,\n  "stages": [\n' "$(date +%F)" "$(nproc)" "$SECONDS"
    printf '%s\n' "${rows[@]}" | sed '$!s/$/,/'
    printf '  ]\n}\n'
  } >"$durations"
fi
printf '\n'
printf '%s\n' "${summary[@]}"
if ((failed)); then
  printf 'FAILED after %d s\n' "$SECONDS"
  exit 1
fi
printf 'passed in %d s\n' "$SECONDS"
