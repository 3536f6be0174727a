# SPDX-License-Identifier: Apache-2.0
"""Time to the first token through prefill and decode apart, beside a single vLLM instance and vLLM's MooncakeConnector.

$ python benchmarks/ttft.py [--quick] [--models small wide] [--pairs 1/1 2/1] [--prompts 128 1024 4096]
      [--sides ours mooncake bare] [--rounds 7] [--seconds 120] [--requests 48] [--folder DIR] [--check] [--json]

Real engines on vLLM's CPU backend, Llamas of random weights (helpers/ttft_sides.py), float32, streamed by the proxy. A
pair is prefill's and decode's tensor-parallel size; the single instance has prefill's. Each side takes turns with the
single instance, and its figures are divided by the single instance's. The idle one of the two is stopped (SIGSTOP). A
round sends one request of every prompt length to both. Prompts are new each time and the same for both, and all tokens
must be equal. Then comes the load, in turns again: --requests requests of 512 + 16 tokens, 8 at a time. Figures are
medians of the rounds. Brackets hold the first and third quartile of the ratios.

ours      LayerwisePushConnector behind `vllm-ascend-pd proxy`, with all prompts sent to prefill
mooncake  vLLM's MooncakeConnector behind helpers/pull_proxy.py, over TCP as ours
bare      no connector behind helpers/pull_proxy.py: decode gets each prompt's last token alone, answers wrongly, and
          shows what two engines cost without any transfer
verified  ours, with `verify_kv` all: at most VERIFY_BAR of ours at 4096 tokens

At the end come all bars with their ratios. Those of the time to the first token alone, at both pairs, take about seven
minutes on two idle cores:

$ python benchmarks/ttft.py --models small --requests 0

A side that does not start, or returns other tokens than the single instance, has a row that says why, and the exit code
is 1. With --check it is also 1 if a bar is missed or could not be measured. Bars compare ours with *bare* and
*mooncake* by what each takes of the single instance's time beside it.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from helpers.report import options, quartiles
from helpers.ttft_sides import MODELS, SIDES, Pair, Setting, Side, SideFailedError, single

from harness import agreement
from harness.client import Completion, at_once, random_prompt
from harness.models import make_model
from harness.processes import StartupError, interrupt_on_sigterm

TTFT_BARS = {"1/1": {128: 1.15, 1024: 1.08, 4096: 1.08}, "2/1": {128: 1.2, 1024: 1.15, 4096: 1.15}}
"""Most of *bare*'s time, by pair and prompt tokens. The single instance is no measure: two engines take longer than it
even without a transfer."""
VERIFY_BAR = 1.05
RATE_BAR = 0.75
"""Least of the single instance's requests/s."""
TOKENS = 4  # generated after each prompt, all of which must be right
LOAD_PROMPT, LOAD_TOKENS, CONCURRENCY = 512, 16, 8
LOAD_TURNS = 3
LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Row:
    """Of one side, at one prompt length or (None) under load. `of_single`: its median by the single instance's, in the
    same rounds; of a rate, too. `failure`: why there are no figures."""

    model: str
    pair: str
    side: str
    measure: str  # "ttft" or "load"
    prompt: int = 0
    rounds: int = 0
    value: float = 0.0  # ttft: milliseconds; load: requests a second
    single: float = 0.0
    ttft_ms: float = 0.0  # load: median of its requests
    single_ttft_ms: float = 0.0
    cpu_ms: float = 0.0  # of all processes of the side, per request
    single_cpu_ms: float = 0.0
    quartiles: tuple[float, float] = (0.0, 0.0)  # of the rounds' ratios, the first and the third
    failure: str = ""
    load_average: float = 0.0

    @property
    def of_single(self) -> float:
        return self.value / self.single if self.single else 0.0

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "of_single": self.of_single})

    def __str__(self) -> str:
        beginning = f"{self.model:<6}{self.pair:>4}  {self.side:<9}"
        if self.failure:
            return f"{beginning}DID NOT RUN: {self.failure}"
        low, high = self.quartiles
        spread = f"{self.of_single:>6.2f}x  (half of {self.rounds} rounds {low:.2f} to {high:.2f})"
        load = f"load {self.load_average:.1f}"
        cpu = f"CPU per request {self.cpu_ms:.0f} and {self.single_cpu_ms:.0f} ms"
        if self.measure == "ttft":
            figures = f"{self.prompt:>5} tokens{self.value:>9.0f} ms{self.single:>9.0f} ms"
            return f"{beginning}{figures} {spread}  {load}  {cpu}"
        more = f"TTFT {self.ttft_ms:.0f} and {self.single_ttft_ms:.0f} ms, {cpu}"
        rates = f"{self.value:>8.2f} /s{self.single:>9.2f} /s"
        return f"{beginning}{CONCURRENCY:>5} at once{rates} {spread}  {load}  {more}"


HEADER = f"{'model':<6}{'pair':>4}  {'side':<9}{'':<12}{'TTFT, rate':>11}{'single':>12}{'of single':>11}"


@dataclass(frozen=True)
class Amount:
    prompts: tuple[int, ...]
    rounds: int
    seconds: float
    requests: int


def compare(side: Side, base: Side, setting: Setting, amount: Amount) -> Iterator[Row]:
    where = (setting.model, str(setting.pair), side.name)
    both = (side, base)
    for each in both:  # the first requests find each other, and load what is loaded late
        with each.turn():
            for tokens in amount.prompts:
                each.ask(prompt(setting, tokens, "first"), TOKENS)
    found: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in amount.prompts}
    cpu = {each.name: dict.fromkeys(amount.prompts, 0.0) for each in both}
    until = time.monotonic() + amount.seconds
    number = 0
    while number < amount.rounds and (number < LEAST_ROUNDS or time.monotonic() < until):
        taken: dict[str, list[float]] = {}
        answers: dict[str, list[Completion]] = {}
        for each in both if number % 2 else both[::-1]:
            with each.turn():
                each.ask(prompt(setting, 16, f"wake {number}"), 1)
                # A side has prompts of its own: the single instance may still have those of the last one in its cache.
                completions = []
                for tokens in amount.prompts:
                    used = each.cpu_seconds()
                    completions.append(each.ask(prompt(setting, tokens, f"{side.name} {number}"), TOKENS))
                    cpu[each.name][tokens] += each.cpu_seconds() - used
            taken[each.name] = [completion.ttft * 1000 for completion in completions]
            answers[each.name] = completions
        check_answers(side, answers[side.name], answers[base.name])
        for tokens, mine, theirs in zip(amount.prompts, taken[side.name], taken[base.name], strict=True):
            found[tokens].append((mine, theirs))
        number += 1
    for tokens, times in found.items():
        value, reference = (median(column) for column in zip(*times, strict=True))
        figures = (tokens, number, value, reference)
        cpu_ms, single_cpu_ms = (cpu[each.name][tokens] / number * 1000 for each in both)
        used_ms = {"cpu_ms": cpu_ms, "single_cpu_ms": single_cpu_ms}
        yield Row(*where, "ttft", *figures, **used_ms, quartiles=spread(times), load_average=os.getloadavg()[0])
    if amount.requests:
        yield measure_load(side, base, setting, amount.requests)


def measure_load(side: Side, base: Side, setting: Setting, requests: int) -> Row:
    rates: list[tuple[float, float]] = []
    ttfts: dict[str, list[float]] = {side.name: [], base.name: []}
    cpu = {side.name: 0.0, base.name: 0.0}
    for number in range(LOAD_TURNS):
        prompts = [prompt(setting, LOAD_PROMPT, f"{side.name} load {number} {index}") for index in range(requests)]
        rate: dict[str, float] = {}
        answers: dict[str, list[Completion]] = {}
        for each in (side, base) if number % 2 else (base, side):
            with each.turn():
                each.ask(prompt(setting, 16, f"wake load {number}"), 1)
                begun, used = time.perf_counter(), each.cpu_seconds()
                completions = at_once(lambda p, each=each: each.ask(p, LOAD_TOKENS), prompts, CONCURRENCY)
                rate[each.name] = requests / (time.perf_counter() - begun)
                cpu[each.name] += each.cpu_seconds() - used
            ttfts[each.name] += [completion.ttft * 1000 for completion in completions]
            answers[each.name] = completions
        check_answers(side, answers[side.name], answers[base.name])
        rates.append((rate[side.name], rate[base.name]))
    value, reference = (median(column) for column in zip(*rates, strict=True))
    return Row(
        setting.model,
        str(setting.pair),
        side.name,
        "load",
        LOAD_PROMPT,
        LOAD_TURNS,
        value,
        reference,
        median(ttfts[side.name]),
        median(ttfts[base.name]),
        *(cpu[each.name] / (requests * LOAD_TURNS) * 1000 for each in (side, base)),
        quartiles=spread(rates),
        load_average=os.getloadavg()[0],
    )


def prompt(setting: Setting, tokens: int, seed: str) -> list[int]:
    return random_prompt(tokens, seed, MODELS[setting.model].vocab_size)


def spread(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return quartiles([mine / theirs for mine, theirs in pairs])


def check_answers(side: Side, mine: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    if not side.answers_rightly:
        return
    wrong = [why for a, b in zip(mine, theirs, strict=True) if (why := agreement.compare(a, b)[1])]
    if wrong:
        raise SideFailedError(f"{len(wrong)} of {len(mine)} answers differ from the single instance's: {wrong[0]}")


def measure(setting: Setting, sides: Sequence[str], amount: Amount) -> Iterator[Row]:
    """Rows of each side, in this order; one that fails has a row that says so as its last."""
    with single(setting) as base:
        with base.turn():
            base.ask(prompt(setting, 16, "first"), 1)
        for name in sides:
            try:
                with SIDES[name](setting) as side:
                    yield from compare(side, base, setting, amount)
            except StartupError as error:
                yield failed(setting, name, SideFailedError.to_start(error))
            except SideFailedError as error:
                yield failed(setting, name, error)


def failed(setting: Setting, side: str, error: SideFailedError) -> Row:
    return Row(setting.model, str(setting.pair), side, "failure", failure=str(error), load_average=os.getloadavg()[0])


@dataclass(frozen=True)
class Bar:
    """What is required of one row of ours. `ratio`: ours by the other side's. None: the other side did not run."""

    where: str
    other: str
    ratio: float | None
    required: str
    holds: bool

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{self.where}: not compared with {self.other}, which did not run"
        return f"{self.where}: {self.ratio:.2f} times {self.other}, {'' if self.holds else 'not '}{self.required}"


def bars(rows: Sequence[Row], sides: Sequence[str]) -> Iterator[Bar]:
    """All bars of the rows of ours. `sides`: those that were asked for."""
    measured = {(row.model, row.pair, row.side, row.measure, row.prompt): row for row in rows}
    for row in rows:
        ours = measured.get((row.model, row.pair, "ours", row.measure, row.prompt))
        if row.side == "verified" and row.prompt == 4096 and not row.failure and ours is not None:
            times = row.of_single / ours.of_single
            where = f"{row.model} {row.pair}, {row.prompt} tokens, verified"
            yield Bar(where, "ours", times, f"{VERIFY_BAR} at most", times <= VERIFY_BAR)
        if row.side != "ours" or row.failure:
            continue
        ttft = row.measure == "ttft"
        where = f"{row.model} {row.pair}, {f'{row.prompt} tokens' if ttft else 'load'}"
        if not ttft:
            holds = row.of_single >= RATE_BAR
            yield Bar(where, "the single instance's requests/s", row.of_single, f"{RATE_BAR} at least", holds)
        most = TTFT_BARS.get(row.pair, {}).get(row.prompt) if ttft else None
        # Ours is ahead of Mooncake's at every prompt length, and serves at least as many requests/s.
        compared = ("mooncake", *(["bare"] if most is not None else []))
        for name in [side for side in sides if side in compared]:
            what = f"{name}'s" if ttft else f"{name}'s requests/s"
            other = measured.get((row.model, row.pair, name, row.measure, row.prompt))
            if other is None:
                yield Bar(where, name, None, "", holds=False)
                continue
            times = row.of_single / other.of_single
            if name == "bare" and most is not None:
                yield Bar(where, what, times, f"{most} at most", times <= most)
            elif ttft:
                yield Bar(where, what, times, "less than 1", times < 1)
            else:
                yield Bar(where, what, times, "1 at least", times >= 1)


def misses(rows: Sequence[Row], sides: Sequence[str]) -> Iterator[str]:
    """Bars that are missed, or not shown because a side did not run. Arguments: as in `bars`."""
    return (str(bar) for bar in bars(rows, sides) if not bar.holds)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="the small model, prompts of 128 and 1024 tokens")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pairs", nargs="+", type=Pair.parse, default=[Pair(1, 1), Pair(2, 1)], metavar="P/D")
    parser.add_argument("--prompts", nargs="+", type=int, default=[128, 1024, 4096], help="tokens, up to 4096")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which a side begins no new round")
    parser.add_argument("--requests", type=int, default=48, help="of the load; 0: none")
    parser.add_argument("--folder", type=Path, help="keeps the checkpoints and the engines' logs")
    args = parser.parse_args()
    if args.quick:
        args.models, args.prompts = ["small"], [128, 1024]
    if not (min(args.prompts) > 0 and max(args.prompts) <= 4096 and args.rounds >= LEAST_ROUNDS):
        parser.error(f"--prompts must be of 1 to 4096, --rounds at least {LEAST_ROUNDS}")
    interrupt_on_sigterm()
    amount = Amount(tuple(args.prompts), args.rounds, args.seconds, args.requests)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not args.json:
            print(HEADER)
        for model in args.models:
            path = make_model(MODELS[model], folder / "models")
            for pair in args.pairs:
                logs = folder / f"{model}-{pair.prefill}-{pair.decode}"
                logs.mkdir(parents=True, exist_ok=True)
                setting = Setting(model, path, pair, logs)
                for row in measure(setting, args.sides, amount):
                    rows.append(row)
                    print(row.as_json() if args.json else row, flush=True)
    for row in rows:
        if row.failure:
            print(row, file=sys.stderr)
    missed = list(misses(rows, args.sides))
    if not args.json:
        for bar in bars(rows, args.sides):
            print(bar)
    for miss in missed:
        print(miss, file=sys.stderr)
    return 1 if any(row.failure for row in rows) or (args.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
