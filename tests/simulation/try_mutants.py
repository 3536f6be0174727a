# SPDX-License-Identifier: Apache-2.0
"""Takes guards of the product out, one at a time, to see who notices: quick tests, and the simulation, which runs the
scenario of found.py with the guard's name, if there is one, and then seeds.

From the folder tests/: `python -m simulation.try_mutants [-k TEXT] [--jobs N]`. It prints a line for each guard, and
fails if nobody notices one of them, if a quick test fails with all guards, or if a seed does.

Each guard is tried in processes of its own: forked, because imports take longer than most tests and seeds.
"""

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeAlias

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "simulation.try_mutants", *sys.argv[1:]])
os.environ["VLLM_ASCEND_PD_CHECK_THREADS"] = "1"  # before the product is imported

import pytest

import simulation.engine  # what most tests and seeds need; the simulation itself is put in place later
from simulation.found import FOUND, ORDERS_WITHOUT_GUARD
from simulation.mutants import EVERYTHING, MUTANTS, Mutant, quick_tests
from simulation.scenario import Scenario

_TESTS = Path(__file__).parents[1]
# A test may take 60 s. So a process that takes this long hangs.
_LONGEST_S = 600.0
_Answers: TypeAlias = dict[str, tuple[str | Exception, float]]
_forked = multiprocessing.get_context("fork")


@dataclass
class _Job:
    """One guard that is tried in one way."""

    name: str
    # Returns who notices that the guard is missing; "" if nobody does.
    notices: Callable[[Mutant], str]
    began: float = 0.0


class _Failures:
    """A plugin of pytest that notes which test failed first."""

    def __init__(self) -> None:
        self.first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.first = self.first or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.first = self.first or f"{report.nodeid} cannot be collected"


def _pytest(paths: Iterable[str], *options: str, plugins: Iterable[object] = ()) -> None:
    of_all = [f"--rootdir={_TESTS.parent}", "--quiet", "-p", "no:cacheprovider", "-m", "not long"]
    pytest.main([*of_all, *options, *(str(_TESTS / path) for path in paths)], plugins=list(plugins))


def _collect(paths: Iterable[str]) -> None:
    """Imports the tests, so that forked processes need not do so."""
    with contextlib.redirect_stdout(io.StringIO()):
        _pytest(paths, "--collect-only")


def _tests_notice(mutant: Mutant) -> str:
    """Runs the quick tests that belong to a guard. Returns the first one that fails."""
    failures = _Failures()
    with mutant.made():
        _pytest(quick_tests(mutant), "--exitfirst", "--tb=no", "--timeout=60", plugins=[failures])
    return failures.first


def _simulation_notices(found: Scenario | None, mutant: Mutant) -> str:
    """Runs a scenario in several orders of threads, and seeds. Returns what first violates a rule, and which one."""
    from simulation.world import World

    runs = [(f"order {order} of the scenario", found, order) for order in range(ORDERS_WITHOUT_GUARD) if found]
    runs += [(f"seed {seed}", mutant.scenario(seed), 0) for seed in range(mutant.seeds)]
    for name, scenario, order in runs:
        with mutant.made():
            violations = World(scenario, order).run().violations
        if violations:
            if others := World(scenario, order).run().violations:
                raise RuntimeError(f"with all guards, too, {name} violates {others[0]}")
            return f"{name}: {violations[0]}"
    return ""


def _run(job: _Job, mutant: Mutant, answers: Connection) -> None:
    """In a process of its own: sends who notices, or an exception."""
    answer: str | Exception
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            answer = job.notices(mutant)
    except Exception as error:  # noqa: BLE001 - `_answers` raises it
        answer = error
    answers.send(answer)
    answers.close()
    os._exit(0)  # threads of tests may wait for ever without the guard


def _answers(
    jobs: Iterable[_Job], at_once: int, mutants: dict[str, Mutant]
) -> dict[str, tuple[str | Exception, float]]:
    """Runs jobs, some at once. Returns the answer and the seconds of each."""
    left, running, answers = deque(jobs), {}, {}
    while left or running:
        while left and len(running) < at_once:
            job = left.popleft()
            receiver, sender = _forked.Pipe(duplex=False)
            process = _forked.Process(target=_run, args=(job, mutants[job.name], sender), daemon=False)
            job.began = time.monotonic()
            process.start()
            sender.close()
            running[receiver] = job, process
        oldest = min(job.began for job, _ in running.values())
        ready = wait(list(running), max(0.0, oldest + _LONGEST_S - time.monotonic()))
        late = [each for each, (job, _) in running.items() if time.monotonic() - job.began >= _LONGEST_S]
        for each in {*ready, *late}:
            job, process = running.pop(each)
            try:
                answer = each.recv() if each in ready else TimeoutError(f"it does not end within {_LONGEST_S:g} s")
            except EOFError:
                answer = "its process was killed"  # by a signal: Mooncake's library may do so
            process.kill()
            process.join()
            answers[job.name] = answer, time.monotonic() - job.began
            print(f"  {job.name}: {str(answer)[:150] or '-'} ({answers[job.name][1]:.1f} s)", flush=True)
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="only", default="", help="only guards whose names contain this")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once")
    parser.add_argument("--seeds", type=int, help="the most seeds, if they are fewer than mutants.py says")
    parser.add_argument("--without", choices=["tests", "seeds"], help="tries only the other ones")
    arguments = parser.parse_args()
    chosen = {name: each for name, each in MUTANTS.items() if arguments.only in name} | {EVERYTHING: Mutant(())}
    if arguments.seeds is not None:
        chosen = {name: replace(each, seeds=min(each.seeds, arguments.seeds)) for name, each in chosen.items()}
    for mutant in chosen.values():  # a guard whose source has changed fails at once
        with mutant.made():
            pass
    tests: _Answers = {}
    seeds: _Answers = {}
    if arguments.without != "tests":
        _collect(list(dict.fromkeys(path for mutant in chosen.values() for path in quick_tests(mutant))))
        print("quick tests:")
        jobs = [_Job(name, _tests_notice) for name, mutant in chosen.items() if quick_tests(mutant)]
        tests = _answers(jobs, arguments.jobs, chosen)
    if arguments.without != "seeds":
        import simulation.world  # noqa: F401 - it changes the product's modules, so it comes after the tests

        logging.getLogger("vllm").setLevel(logging.CRITICAL)
        print("seeds:")
        jobs = [
            _Job(name, partial(_simulation_notices, FOUND.get(name))) for name, mutant in chosen.items() if mutant.seeds
        ]
        seeds = _answers(jobs, arguments.jobs, chosen)
    return _report(chosen, tests, seeds)


def _report(chosen: dict[str, Mutant], tests: _Answers, seeds: _Answers) -> int:
    """Prints who noticed which guard, and how many of each folder. Returns the exit code."""
    wrong = []
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    print()
    for name, mutant in chosen.items():
        answers = [of[name][0] if name in of else "" for of in (seeds, tests)]
        errors = [str(each) for each in answers if isinstance(each, Exception)]
        by_seed, by_test = (isinstance(each, str) and each != "" for each in answers)
        if errors or (by_seed or by_test) != bool(mutant.edits):
            wrong.append(name)
        print(f"{name}: {'; '.join(str(each)[:200] for each in answers if each) or 'NOBODY'}")
        noticed = {"guards": 1, "seeds": by_seed, "tests": by_test, "nobody": not by_seed and not by_test}
        for where in {mutant.where, "all"} if mutant.edits else ():
            counts[where].update(noticed)
    print("\n| where | guards | noticed by seeds | by quick tests | by nobody |\n|---|---:|---:|---:|---:|")
    for where, of in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"| `{where}/` | {of['guards']} | {+of['seeds']} | {+of['tests']} | {+of['nobody']} |")
    print(f"\n{len(wrong)} wrong: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    assert simulation.engine
    sys.exit(main())
