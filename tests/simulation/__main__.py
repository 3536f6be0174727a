# SPDX-License-Identifier: Apache-2.0
"""Runs seeds of the simulation. From the folder tests/: `python -m simulation --help`.

seeds FIRST-LAST   runs these seeds, without the last, until the first violation, which it shrinks
run SEED           runs one seed, and prints its scenario and its history in words
shrink SEED        looks for the shortest scenario with the same violation, and prints it with its history
found              runs the scenarios of found.py, with their guards and without
real-ones-left     prints the product's names that refer to a real clock, real threads or real randomness
serve              reads commands, each a line of JSON, and runs each in a fork. It answers with a line, too: the exit
                   code, and what the fork has printed
"""

import argparse
import ast
import gc
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # before vLLM is imported
os.environ.setdefault("VLLM_ASCEND_PD_CHECK_THREADS", "1")
if __name__ == "__main__":
    gc.disable()  # world.py does so in the end; imports take a quarter less

from simulation import stand_ins
from simulation.found import FOUND, GUARDS, ORDERS_WITHOUT_GUARD
from simulation.kernel import BEGIN_S
from simulation.mutants import MUTANTS, Mutant
from simulation.scenario import Scenario, draw
from simulation.shrink import shrink
from simulation.world import World

# Of `found`: in so many orders of threads a scenario passes.
_ORDERS = 8


def history(world: World) -> str:
    """Returns what has happened, in words: seconds, thread, event."""
    return "\n".join(
        f"{now - BEGIN_S:9.4f} {thread:22} {sentence.format(*parts)}"
        for now, thread, sentence, parts in world.kernel.history
    )


def report(world: World) -> str:
    scenario = world.scenario
    return "\n".join(["", history(world), "", repr(scenario), *world.violations])


def seeds_of(text: str) -> Iterable[int]:
    """Returns the seeds of "7", "7-9" (without 9) and "7-"."""
    first, dash, last = text.partition("-")
    if not dash:
        return [int(first)]
    return range(int(first), int(last)) if last else itertools.count(int(first))


def run_seeds(arguments: argparse.Namespace, fixed: dict[str, Any]) -> bool:
    """Returns whether no seed fails."""
    began, requests, failed = time.process_time(), 0, 0
    outcomes: Counter[str] = Counter()
    for seed in seeds_of(arguments.seeds):
        scenario = draw(seed, **fixed)
        world = World(scenario).run()
        requests += len(scenario.requests)
        outcomes.update(str(client.outcome) for client in world.router.clients.values())
        seconds = time.process_time() - began
        if arguments.digests:
            print(seed, world.digest(), len(world.kernel.history), flush=True)
        if world.violations:
            failed += 1
            print(f"seed {seed}: {world.violations[0]}", flush=True)
            if not arguments.go_on:
                print(report(shrink(scenario).world))
                break
        if requests >= arguments.requests or seconds >= arguments.seconds:
            break
    print(", ".join(f"{outcome}: {count}" for outcome, count in sorted(outcomes.items())))
    print(f"{requests} requests in {time.process_time() - began:.0f} s of one core; {failed} seeds fail", flush=True)
    return not failed


def run_one(scenario: Scenario, arguments: argparse.Namespace) -> int:
    """Runs or shrinks one scenario. Returns the exit code."""
    if arguments.command == "run":
        world = World(scenario, arguments.order).run()
        print(report(world))
        return bool(world.violations)
    best = shrink(scenario)
    print(report(best.world))
    before, after = len(scenario.events), len(best.scenario.events)
    print(f"{before} events became {after} in {best.runs} runs; it fails in the order of threads {best.order}")
    return 0


def run_found(arguments: argparse.Namespace) -> bool:
    """Returns whether each scenario passes, and is noticed without its guard."""
    wrong = []
    for name, scenario in FOUND.items():
        if arguments.only not in name:
            continue
        violations = list(_violations(scenario, _ORDERS))
        with {**MUTANTS, **GUARDS}[name].made():
            noticed = next(_violations(scenario, ORDERS_WITHOUT_GUARD), "")
        print(f"{name}: {noticed[:160] or 'NOT NOTICED'}", flush=True)
        if violations or not noticed:
            wrong.append(name)
            print("".join(f"  with its guard: {each}\n" for each in violations), end="", flush=True)
    return not wrong


def _violations(scenario: Scenario, orders: int) -> Iterator[str]:
    """Yields what is violated in each of so many orders of threads."""
    for order in range(orders):
        yield from World(scenario, order).run().violations[:1]


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else is an answer
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as printed:
            if (child := os.fork()) == 0:
                os.dup2(printed.fileno(), 1)
                _run_and_exit(json.loads(line))
            _, status = os.waitpid(child, 0)
            printed.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), printed.read()]), file=answers, flush=True)


def _run_and_exit(arguments: list[str]) -> None:
    code = 1
    try:
        code = main(arguments)
    except BaseException:  # noqa: BLE001 - it ends here
        traceback.print_exc(file=sys.stdout)
    sys.stdout.flush()
    os._exit(code)  # what ends with the process is its parent's


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["seeds", "run", "shrink", "found", "real-ones-left", "serve"])
    parser.add_argument("seeds", nargs="?", default="0-300")
    parser.add_argument("--requests", type=float, default=float("inf"), help="ends after so many requests")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="ends after so many seconds of one core")
    parser.add_argument("--digests", action="store_true", help="prints a digest of each seed's history")
    parser.add_argument("--go-on", action="store_true", help="does not end at a violation")
    parser.add_argument("--only", default="", help="of found: only names that contain this")
    parser.add_argument("--mutant", default="", help="of run and shrink: the guard that is taken out")
    parser.add_argument("--order", type=int, default=0, help="another order of threads")
    parser.add_argument("fixed", nargs="*", help="what of Shape and Faults is not drawn, and requests: name=value")
    options = parser.parse_intermixed_args(arguments)
    fixed = {name: ast.literal_eval(value) for name, _, value in (each.partition("=") for each in options.fixed)}
    if options.command == "serve":
        serve()
        return 0
    if options.command == "real-ones-left":
        print("\n".join(stand_ins.real_ones_left()), end="")
        return 0
    if options.command == "seeds":
        return not run_seeds(options, fixed)
    if options.command == "found":
        return not run_found(options)
    mutant = MUTANTS[options.mutant] if options.mutant else Mutant(())
    scenario = replace(mutant, fixed={**mutant.fixed, **fixed}).scenario(int(options.seeds))
    with mutant.made():
        return run_one(scenario, options)


if __name__ == "__main__":
    sys.exit(main())
