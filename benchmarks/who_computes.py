# SPDX-License-Identifier: Apache-2.0
"""What it brings that decode computes cheap prompts itself (`who_computes: "auto"`), and what it costs other requests.

$ python benchmarks/who_computes.py [--quick] [--models small demo] [--parts first turns load] [--rounds 15]
      [--conversations 6] [--loads 4] [--folder DIR] [--check] [--json]

Real engines on vLLM's CPU backend: one prefill engine, and two decode engines that are started alike, each behind a
proxy of its own. Two, because a decode engine learns from its own requests: one would learn from all ways together.
They take turns, and the idle one is stopped (SIGSTOP). Ways to send a prompt:

auto     to the first proxy: the decode engine decides by itself (`who_computes: "auto"`, the default)
prefill  to the second proxy, with the header `X-Who-Computes: prefill`: all prompts are sent to prefill
alone    to the second proxy, with the header `X-Who-Computes: decode`: decode computes the prompt
direct   to the second decode engine itself, without proxy and ticket: what a single engine needs

first    Prompts of 8, 32 and 64 tokens, one at a time: auto's time to the first token by alone's and by direct's.
turns    Conversations: a prompt of 200 tokens, then turns of 40 new tokens after 64 generated ones. All turns but the
         first count: auto's time to the first token by alone's and by direct's.
load     Eight streams decode, and prompts arrive at random: 70 % of 8 to 128 tokens, 30 % of 1000 to 4000, at the same
         times for auto and prefill. Time per output token of the streams, and the median time to the first token of
         the load: auto's by prefill's.

Tokens of auto, alone and direct must be equal. Figures are medians of rounds; brackets hold the first and third
quartile of the rounds' ratios. `by decode` is the share of auto's prompts that decode has computed, by its metric.

With --check, the exit code is 1 if a bar is missed. It is also 1 if a side fails.
"""

import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import aiohttp
from helpers.mixed_load import LoadResult, MixedLoad, arrivals
from helpers.report import options, quartiles
from helpers.ttft_sides import SideFailedError
from helpers.who_computes_sides import SPECS, Side, Stand, Way, running_stand

from harness import agreement
from harness.client import Completion, StreamError, random_prompt
from harness.models import make_model
from harness.processes import StartupError, interrupt_on_sigterm

FIRST_TOKEN_BAR = 1.3
"""Most of the time of decode alone."""
TURN_BAR = 1.2
TOKEN_BAR = 1.1
"""Most of the time per output token with all prompts sent to prefill."""
LOAD_BAR = 1 / 1.3
"""1.3 times better: most of the time to the first token with all prompts sent to prefill."""
SHORT_PROMPTS = (8, 32, 64)
FIRST_TURN, GENERATED, ADDED, TURNS = 200, 64, 40, 6
"""Tokens of a conversation's first prompt, of an answer, and of what the client adds; turns after the first. Decode
caches whole blocks of 128 tokens, so these turns leave it 48 to 152 tokens to compute."""
TOKENS = 4
STREAMS, STREAM_TOKENS = 8, 3000
LOAD_SECONDS = 15.0
RATES = {"small": 4.0, "demo": 0.4}
"""Requests/s that leave prefill less than half busy."""
PARTS = ("first", "turns", "load")
BY = ("decode", "prefill")


@dataclass(frozen=True)
class Row:
    """One comparison. Times are medians, in milliseconds."""

    model: str
    measure: str
    case: str
    auto_ms: float
    against: str  # a way
    other_ms: float
    # Of the rounds' ratios: the first quartile and the third.
    quartiles: tuple[float, float]
    rounds: int
    # Most that `ratio` may be. None: for information.
    bar: float | None
    # How many of auto's prompts in this part were computed, by whom and why: "decode cheap".
    computed: dict[str, int]
    load_average: float

    @property
    def ratio(self) -> float:
        return self.auto_ms / self.other_ms

    @property
    def by_decode(self) -> float:
        """Share of auto's prompts that decode has computed. NaN: the engine does not tell."""
        by = Counter({who: sum(n for by_why, n in self.computed.items() if by_why.startswith(who)) for who in BY})
        return by["decode"] / by.total() if by.total() else math.nan

    @property
    def holds(self) -> bool:
        return self.bar is None or self.ratio <= self.bar

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "ratio": self.ratio, "holds": self.holds})

    def __str__(self) -> str:
        bar = "" if self.bar is None else f"bar {self.bar:.2f}"
        half = f"({self.quartiles[0]:.2f} to {self.quartiles[1]:.2f})"
        text = (
            f"{self.model:<6}{self.measure:<14}{self.case:<12}{self.auto_ms:>8.1f} ms, {self.against:<8}"
            f"{self.other_ms:>8.1f} ms {self.ratio:>6.2f}x {half:<16}{bar:<9} "
            f"by decode {self.by_decode:<4.0%} load {self.load_average:.1f}"
        )
        return text if self.holds else f"{text}   <- misses its bar"


@dataclass(frozen=True)
class Amount:
    rounds: int
    conversations: int
    loads: int


Times = dict[str, list[float]]  # milliseconds of each round, by way


class Benchmark:
    """Measures one model's stand, part by part."""

    def __init__(self, model: str, path: Path, stand: Stand, amount: Amount) -> None:
        self._model, self._path, self._stand, self._amount = model, path, stand, amount
        self._vocabulary, self._rate = SPECS[model].vocab_size, RATES[model]
        # Of the part that is measured: auto's prompts, by whom they were computed and why.
        self._computed: Counter[str] = Counter()

    def warm_up(self) -> None:
        """The first requests find each other, and load what is loaded late."""
        for side in self._stand.both:
            with side.turn():
                for way in side.ways:
                    for tokens in (*SHORT_PROMPTS, FIRST_TURN, 1000, 4000):
                        way.ask(self._prompt(tokens, f"{way.name} first"), TOKENS)

    def measure(self, part: str) -> Iterator[Row]:
        """The rows of one of `PARTS`."""
        self._computed = Counter()
        yield from {"first": self._first, "turns": self._turns, "load": self._load}[part]()

    def _first(self) -> Iterator[Row]:
        times: dict[int, Times] = {tokens: {} for tokens in SHORT_PROMPTS}

        def ask(way: Way, number: int, seed: str) -> list[Completion]:
            found = []
            for tokens in SHORT_PROMPTS:
                completion = way.ask(self._prompt(tokens, f"{seed} {number}"), TOKENS)
                times[tokens].setdefault(way.name, []).append(completion.ttft * 1000)
                found.append(completion)
            return found

        self._in_turns(self._amount.rounds, "first", ask)
        for tokens, of_ways in times.items():
            for against, bar in (("alone", FIRST_TOKEN_BAR), ("direct", FIRST_TOKEN_BAR), ("prefill", None)):
                yield self._row("first token", f"{tokens} tokens", of_ways, against, bar)

    def _turns(self) -> Iterator[Row]:
        times: list[Times] = [{} for _ in range(TURNS)]

        def ask(way: Way, number: int, seed: str) -> list[Completion]:
            prompt = self._prompt(FIRST_TURN, f"{seed} conversation {number}")
            found = []
            for turn in range(TURNS + 1):
                completion = way.ask(prompt, GENERATED)
                found.append(completion)
                if turn:
                    times[turn - 1].setdefault(way.name, []).append(completion.ttft * 1000)
                prompt = [*prompt, *completion.token_ids, *self._prompt(ADDED, f"{seed} {number} turn {turn}")]
            return found

        self._in_turns(self._amount.conversations, "turns", ask)
        every: Times = {name: [each for turn in times for each in turn[name]] for name in times[0]}
        for against, bar in (("alone", TURN_BAR), ("direct", TURN_BAR), ("prefill", None)):
            yield self._row("turns", "all", every, against, bar)
        for index, of_ways in enumerate(times):
            yield self._row("turns", f"turn {index + 2}", of_ways, "alone", None)

    def _load(self) -> Iterator[Row]:
        both: list[dict[str, LoadResult]] = []
        for number in range(self._amount.loads):
            plan = arrivals(LOAD_SECONDS, self._rate, f"{number}")
            found = {}
            for side in self._order(number):
                way = side.ways[-1]
                sender = MixedLoad(way.url, way.headers, str(self._path), self._vocabulary, STREAMS, STREAM_TOKENS)
                with side.turn():
                    way.ask(self._prompt(16, f"{way.name} wake load {number}"), 1)
                    before = side.prompts()
                    try:
                        found[way.name] = sender.run(plan, LOAD_SECONDS, f"{way.name} {number}")
                    except (StreamError, aiohttp.ClientError) as error:
                        raise SideFailedError(f"{way.name}: load: {error}") from error
                    if side is self._stand.auto:
                        self._computed += side.prompts() - before
            both.append(found)
        yield from self._load_rows(both)

    def _load_rows(self, both: Sequence[dict[str, LoadResult]]) -> Iterator[Row]:
        names = ("auto", "prefill")
        token_ms = {name: [found[name].token_seconds * 1000 for found in both] for name in names}
        gap_ms = {name: [percentile(found[name].gaps, 0.99) * 1000 for found in both] for name in names}
        ttft_ms = {name: [median(found[name].ttfts) * 1000 for found in both] for name in names}
        rate = f"{self._rate:g}/s"
        yield self._row("output token", rate, token_ms, "prefill", TOKEN_BAR)
        yield self._row("p99 of gaps", rate, gap_ms, "prefill", None)
        yield self._row("load's TTFT", f"{rate} p50", ttft_ms, "prefill", LOAD_BAR)
        for case, least, most in (("short p50", 0, 999), ("long p50", 1000, math.inf)):
            of_length = {
                name: [
                    median(s for s, n in zip(found[name].ttfts, found[name].lengths, strict=True) if least <= n <= most)
                    * 1000
                    for found in both
                ]
                for name in names
            }
            yield self._row("load's TTFT", case, of_length, "prefill", None)

    def _in_turns(self, rounds: int, part: str, ask: Callable[[Way, int, str], list[Completion]]) -> None:
        """Calls `ask` for each round and way. Answers to equal prompts must be equal.

        The two sides may have equal prompts, because each has a prefix cache of its own. Ways on one engine may not.
        """
        for number in range(rounds):
            answers: dict[str, list[Completion]] = {}
            for side in self._order(number):
                with side.turn():
                    for way in side.ways[:: 1 if number % 4 < 2 else -1]:
                        way.ask(self._prompt(16, f"{way.name} {part} wake {number}"), 1)
                        before = side.prompts()
                        seed = part if way.name in ("auto", "alone") else f"{way.name} {part}"
                        answers[way.name] = ask(way, number, seed)
                        if side is self._stand.auto:
                            self._computed += side.prompts() - before
            check_equal(answers["auto"], answers["alone"])

    def _order(self, number: int) -> tuple[Side, Side]:
        auto, told = self._stand.both
        return (told, auto) if number % 2 else (auto, told)

    def _prompt(self, tokens: int, seed: str) -> list[int]:
        return random_prompt(tokens, seed, self._vocabulary)

    def _row(self, measure: str, case: str, times: Times, against: str, bar: float | None) -> Row:
        mine, others = times["auto"], times[against]
        ratios = [a / b for a, b in zip(mine, others, strict=True)]
        figures = (median(mine), against, median(others), quartiles(ratios), len(ratios))
        return Row(self._model, measure, case, *figures, bar, dict(self._computed), os.getloadavg()[0])


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def check_equal(mine: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    wrong = [why for a, b in zip(mine, theirs, strict=True) if (why := agreement.compare(a, b)[1])]
    if wrong:
        raise SideFailedError(f"{len(wrong)} of {len(mine)} answers differ from decode alone's: {wrong[0]}")


def measure(model: str, parts: Sequence[str], amount: Amount, folder: Path) -> Iterator[Row]:
    path = make_model(SPECS[model], folder / "models")
    logs = folder / model
    logs.mkdir(parents=True, exist_ok=True)
    with running_stand(model, path, logs) as stand:
        benchmark = Benchmark(model, path, stand, amount)
        benchmark.warm_up()
        for part in parts:
            yield from benchmark.measure(part)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: 2 minutes")
    parser.add_argument("--models", nargs="+", choices=SPECS, default=list(SPECS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=15, help="of first")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--loads", type=int, default=4, help=f"turns of {LOAD_SECONDS:g} s under load, for each side")
    parser.add_argument("--folder", type=Path, help="keeps the checkpoint and the engines' logs")
    args = parser.parse_args()
    interrupt_on_sigterm()
    amount = Amount(args.rounds, args.conversations, args.loads)
    if args.quick:
        amount = Amount(5, 2, 1)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            for model in args.models:
                for row in measure(model, args.parts, amount, folder):
                    rows.append(row)
                    print(row.as_json() if args.json else row, flush=True)
        except (StartupError, SideFailedError) as error:
            print(f"did not run: {error}", file=sys.stderr)
            return 1
    missed = [row for row in rows if not row.holds]
    for row in missed:
        print(
            f"{row.model} {row.measure}, {row.case}: {row.ratio:.2f} times {row.against}'s, not {row.bar:.2f}",
            file=sys.stderr,
        )
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
