# SPDX-License-Identifier: Apache-2.0
"""When decode gives a prompt its memory: how much of that memory waits, and what it costs.

$ python benchmarks/reservation.py [--quick] [--sides "decode first" "long first" "prefill first" mooncake]
      [--loads fixed mix alone] [--turns 3] [--requests 40] [--rounds 5] [--room 4] [--step-tokens 2048]
      [--folder DIR] [--write] [--check] [--json]

Real engines on vLLM's CPU backend with ttft.py's small model: a prefill engine with steps of --step-tokens, and a
decode engine with memory for --room prompts of 8,000 tokens. The ways take turns. Engines of a way that waits are
stopped (SIGSTOP). All ways get the same prompts, nothing is in a prefix cache, and the first tokens of answers must be
equal.

decode first    behind `vllm-ascend-pd proxy`: decode reserves memory before prefill starts
long first      as that, but prompts that take prefill more than a step are computed first (`prefill_first_tokens`)
prefill first   the same engines behind vllm-router in its mode "nixl": decode reserves memory when prefill has ended
mooncake        vLLM's MooncakeConnector behind helpers/pull_proxy.py, which asks both engines at the same time

fixed    8,000 tokens in, 200 out, 20 at once
mix      500 to 16,000 tokens in, spread evenly over the logarithm, 200 out, 20 at once
alone    128, 1,024, 8,000 and 16,000 tokens, one at a time: time to the first token with memory to spare

running  share of decode's KV in use, over time, that belongs to requests that run
in use   share of decode's memory that requests have

Figures are medians of turns, those of first tokens over all turns. With --check, the exit code is 1 if a bar is missed:
of long first, at least SHARE_BAR running, requests/s at least mooncake's, and alone at most ALONE_BAR of decode first's
time. It is also 1 if a way fails.
"""

import dataclasses
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from helpers.report import ROOT, options
from helpers.reservation_sides import ANSWER, FIXED, LONGEST, SIDES, SPEC, Way, blocks_of, now, running_ways
from helpers.ttft_sides import STEP_TOKENS, SideFailedError

from harness.client import Completion, at_once, random_prompt
from harness.models import make_model
from harness.processes import StartupError, interrupt_on_sigterm
from harness.routers import HAS_VLLM_ROUTER, NEEDS_VLLM_ROUTER

SHARE_BAR, ALONE_BAR = 0.9, 1.1
ROOM = 4
SHORTEST = 500
AT_ONCE = 20
ALONE = (128, 1024, FIXED, LONGEST)
LOADS = ("fixed", "mix", "alone")
COMPARED = 4
"""Tokens of an answer. Prompts of a step differ between ways, and so does the order in which floats are added."""
RESULTS = ROOT / "benchmarks" / "results" / "reservation.json"


@dataclasses.dataclass(frozen=True)
class Row:
    """One way under one load. Times are in seconds."""

    load: str
    way: str
    turns: int
    ttft: float
    """Median."""
    ttft_p95: float = math.nan
    rate: float = math.nan
    """Requests a second."""
    running: float = math.nan
    in_use: float = math.nan
    spread: tuple[float, float] = (math.nan, math.nan)
    """Least and most requests a second of the turns; alone: of the seconds to the first token."""
    load_average: float = 0.0

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        begin = f"{self.load:<13}{self.way:<15}{self.turns:>3}  first token {self.ttft:>7.2f} s"
        low, high = self.spread
        if math.isnan(self.rate):
            return f"{begin} ({low:.2f} to {high:.2f})   load {self.load_average:.1f}"
        return (
            f"{begin}, p95 {self.ttft_p95:>6.2f} s   {self.rate:.3f} /s ({low:.3f} to {high:.3f})   "
            f"running {self.running:>4.0%} of KV in use, {self.in_use:>4.0%} in use   load {self.load_average:.1f}"
        )


@dataclasses.dataclass(frozen=True)
class Amount:
    turns: int
    requests: int
    rounds: int
    room: int
    step_tokens: int


@dataclasses.dataclass
class Turn:
    rate: float
    ttfts: list[float]
    running: float
    in_use: float


def lengths(load: str, requests: int, number: int) -> list[int]:
    """Tokens of each prompt of a turn."""
    if load == "fixed":
        return [FIXED] * requests
    step = math.log(LONGEST / SHORTEST) / (requests - 1)
    found = [round(SHORTEST * math.exp(step * index)) for index in range(requests)]
    random.Random(f"mix {number}").shuffle(found)
    return found


def warm_up(ways: Sequence[Way]) -> None:
    """The first requests find each other, and load what is loaded late."""
    for way in ways:
        with way.turn():
            for tokens in ALONE:
                way.ask(prompt(tokens, "first"), COMPARED)


def measure_load(load: str, ways: Sequence[Way], amount: Amount) -> Iterator[Row]:
    turns: dict[str, list[Turn]] = {way.name: [] for way in ways}
    for number in range(amount.turns):
        prompts = [
            prompt(tokens, f"{load} {number} {index}")
            for index, tokens in enumerate(lengths(load, amount.requests, number))
        ]
        answers: dict[str, list[Completion]] = {}
        for way in turned(ways, number):
            with way.turn():
                way.ask(prompt(16, f"wake {load} {number}"), 1)
                begun = now()
                answers[way.name] = at_once(lambda each, way=way: way.ask(each, ANSWER), prompts, AT_ONCE)
                seconds = now() - begun
                running, every = way.block_seconds(begun, begun + seconds)
            ttfts = [answer.ttft for answer in answers[way.name]]
            share = every / seconds / blocks_of(amount.room)
            turns[way.name].append(Turn(amount.requests / seconds, ttfts, running / every, share))
        check_equal(answers)
    for name, found in turns.items():
        ttfts = sorted(ttft for turn in found for ttft in turn.ttfts)
        rates = [turn.rate for turn in found]
        yield Row(
            load,
            name,
            len(found),
            median(ttfts),
            statistics.quantiles(ttfts, n=20, method="inclusive")[-1],
            median(rates),
            median(turn.running for turn in found),
            median(turn.in_use for turn in found),
            (min(rates), max(rates)),
            os.getloadavg()[0],
        )


def measure_alone(ways: Sequence[Way], amount: Amount) -> Iterator[Row]:
    times: dict[tuple[int, str], list[float]] = {(tokens, way.name): [] for tokens in ALONE for way in ways}
    for number in range(amount.rounds):
        answers: dict[str, list[Completion]] = {}
        for way in turned(ways, number):
            with way.turn():
                way.ask(prompt(16, f"wake alone {number}"), 1)
                answers[way.name] = [way.ask(prompt(tokens, f"alone {number}"), COMPARED) for tokens in ALONE]
            for tokens, answer in zip(ALONE, answers[way.name], strict=True):
                times[tokens, way.name].append(answer.ttft)
        check_equal(answers)
    for (tokens, name), found in times.items():
        yield Row(
            alone(tokens),
            name,
            len(found),
            median(found),
            spread=(min(found), max(found)),
            load_average=os.getloadavg()[0],
        )


def alone(tokens: int) -> str:
    return f"alone {tokens}"


def turned(ways: Sequence[Way], number: int) -> list[Way]:
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def prompt(tokens: int, seed: str) -> list[int]:
    return random_prompt(tokens, seed, SPEC.vocab_size)


def check_equal(answers: dict[str, list[Completion]]) -> None:
    names = list(answers)
    for name in names[1:]:
        pairs = zip(answers[names[0]], answers[name], strict=True)
        wrong = sum(mine.token_ids[:COMPARED] != theirs.token_ids[:COMPARED] for mine, theirs in pairs)
        if wrong:
            raise SideFailedError(f"{wrong} of {len(answers[name])} answers of {name} differ from {names[0]}'s")


@dataclasses.dataclass(frozen=True)
class Bar:
    case: str
    figure: str
    bar: str
    holds: bool


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """All bars that `rows` can show."""
    found = {(row.load, row.way): row for row in rows}
    for row in rows:
        if row.way != "long first":
            continue
        where = f"{row.way}, {row.load}"
        if row.load in ("fixed", "mix"):
            yield Bar(f"{where}, KV of requests that run", f"{row.running:.0%}", "90 %", row.running >= SHARE_BAR)
            if theirs := found.get((row.load, "mooncake")):
                times = row.rate / theirs.rate
                yield Bar(f"{where}, requests a second", f"{times:.2f} times MooncakeConnector's", "1", times >= 1)
        elif first := found.get((row.load, "decode first")):
            times = row.ttft / first.ttft
            yield Bar(f"{where}, first token", f"{times:.2f} times decode first's", f"{ALONE_BAR}", times <= ALONE_BAR)


def results(rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """What RESULTS holds (scripts/page_tables.py)."""
    today = datetime.now(UTC).date().isoformat()
    columns = {
        "load": "load",
        "way": "way",
        "running": "KV in use of requests that run",
        "in_use": "memory in use",
        "rate": "requests/s",
        "ttft": "first token, median, s",
        "ttft_p95": "p95, s",
        "turns": "turns",
    }
    kept = [{name: dataclasses.asdict(row)[name] for name in columns} for row in rows]
    for each in kept:
        for name, value in each.items():
            if isinstance(value, float):
                each[name] = None if math.isnan(value) else round(value, 3)
    return {
        "question": "How much of decode's memory waits?",
        "latest": [
            {"date": today, "case": bar.case, "figure": bar.figure, "bar": bar.bar, "state": bar.holds}
            for bar in bars(rows)
        ],
        "tables": {
            "all": {
                "date": today,
                "machine": f"{os.cpu_count()} virtual cores, {seconds / 60:.0f} minutes",
                "command": "python benchmarks/reservation.py",
                "columns": columns,
                "rows": kept,
            }
        },
    }


def measure(names: Sequence[str], loads: Sequence[str], amount: Amount, folder: Path) -> Iterator[Row]:
    path = make_model(SPEC, folder / "models")
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with running_ways(names, path, logs, amount.room, amount.step_tokens) as ways:
        warm_up(ways)
        for load in loads:
            yield from measure_alone(ways, amount) if load == "alone" else measure_load(load, ways, amount)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn of 20 requests, 2 rounds: 8 minutes")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="of alone")
    parser.add_argument("--room", type=int, default=ROOM, help="at least 2")
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS, help="of prefill's steps")
    parser.add_argument("--folder", type=Path, help="keeps the checkpoint and the engines' logs")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/reservation.json")
    args = parser.parse_args()
    amount = Amount(args.turns, args.requests, args.rounds, args.room, args.step_tokens)
    if args.quick:
        amount = Amount(1, AT_ONCE, 2, args.room, args.step_tokens)
    all_of_it = args.sides == list(SIDES) and args.loads == list(LOADS) and not args.quick
    if args.write and not (all_of_it and args.room == ROOM and args.step_tokens == STEP_TOKENS):
        parser.error("--write needs all sides and loads, in their long form, with the defaults")
    if "prefill first" in args.sides and not HAS_VLLM_ROUTER:
        parser.error(NEEDS_VLLM_ROUTER)
    interrupt_on_sigterm()
    rows: list[Row] = []
    begun = now()
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            for row in measure(args.sides, args.loads, amount, folder):
                rows.append(row)
                print(row.as_json() if args.json else row, flush=True)
        except (StartupError, SideFailedError) as error:
            print(f"did not run: {error}", file=sys.stderr)
            return 1
    missed = [bar for bar in bars(rows) if not bar.holds]
    for bar in missed:
        print(f"{bar.case}: {bar.figure}, not {bar.bar}", file=sys.stderr)
    if args.write:
        RESULTS.write_text(json.dumps(results(rows, now() - begun), indent=2) + "\n")
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
