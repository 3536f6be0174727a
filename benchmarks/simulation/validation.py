# SPDX-License-Identifier: Apache-2.0
"""The simulator against real workers of ours: the same requests at the same times, from the ticket until decode has all
KV. What the simulator is told comes from other runs, of requests that come alone, between the runs compared."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from statistics import median

import numpy as np

from vllm_ascend_pd.tools.plan.model import parse_model

from .cluster import Costs, Setup
from .engines import DecodeSpeed, PrefillSpeed
from .exchange import Exchange, make_exchange
from .figures import Spread, simulated
from .traffic import Arrival, Lengths
from .workers import HEAD_SIZE, HEADS, Speed, Times, Workers

MAX_OFF = 0.2
LAYERS = 8
_LENGTHS = Lengths("uniform", 256, 2048)
_SINGLE = (256, 1024, 2048)  # tokens of requests that come alone
_TOKEN_BYTES = 2 * HEADS * HEAD_SIZE * 2  # of a layer


@dataclass(frozen=True)
class Row:
    """`load`: of what is slower, computing or the link."""

    name: str
    speed: Speed
    load: float


# Over loopback a link is as fast as the processors that others leave, so it is held to less where it is what counts.
# All is slow, so that what other processes take of the machine counts for little.
_COMPUTING, _LINK = Speed(300e-6), Speed(30e-6, link=13e6)
ROWS = (
    Row("computing is slower", _COMPUTING, 0.4),
    Row("computing is slower", _COMPUTING, 0.6),
    Row("computing is slower", _COMPUTING, 0.85),
    Row("the link is slower", _LINK, 0.6),
)


@dataclass(frozen=True)
class Moving:
    """`control_s`: a message, one way; `write_s`: of a layer, besides its bytes."""

    control_s: float
    write_s: float
    bytes_per_s: float


@dataclass
class Alone:
    """Of requests that came alone at `speed`, seconds: (messages, layers, tokens) -> of moving KV; tokens -> of
    computing.

    Where the link keeps up with computing, what counts of moving is one layer, and the last one of those computed,
    before which the processors have slept, as they do in the runs compared; where it does not, one and all layers, not
    computed."""

    speed: Speed
    moved: dict[tuple[float, int, int], list[float]] = field(default_factory=dict)
    computed: dict[int, list[float]] = field(default_factory=dict)

    @property
    def keeps_up(self) -> bool:
        return self.speed.link is None

    def measure(self, pair: Workers, layers: int, rounds: int, computing: bool) -> None:
        """Not computed: from prefill's begin until decode has all KV, with three messages (a grant asked for and given,
        a report). Computed: from the end of that, when the last layer is left to be written, with the report."""
        slept = Speed(self.speed.token_s if computing else 0.0, self.speed.link)
        gap = 0.2 + 1.2 * max(_SINGLE) * (slept.token_s + layers * _TOKEN_BYTES / (slept.link or 1e9))
        lengths = _SINGLE * rounds
        times = pair.serve([(i * gap, tokens) for i, tokens in enumerate(lengths)], slept)
        for tokens, found in zip(lengths, times, strict=True):
            if not computing:
                self.moved.setdefault((3.0, layers, tokens), []).append(found.received - found.begun)
                continue
            self.computed.setdefault(tokens, []).append(sum(found.steps))
            if self.keeps_up:
                self.moved.setdefault((1.0, 1, tokens), []).append(found.received - found.computed)

    def moving(self) -> Moving:
        """The messages, a write per layer, and the bytes."""
        rows = [(messages, layers, layers * tokens * _TOKEN_BYTES) for messages, layers, tokens in self.moved]
        control, write, per_byte = _fit(rows, [median(seconds) for seconds in self.moved.values()])
        if not per_byte:
            raise RuntimeError(f"requests of more bytes took no longer: {self.moved}")
        return Moving(control, write, 1 / per_byte)

    def computing(self) -> PrefillSpeed:
        rows = [(1.0, float(tokens)) for tokens in self.computed]
        step, token = _fit(rows, [median(seconds) for seconds in self.computed.values()])
        return PrefillSpeed(token, step, self.speed.step_tokens)


def _fit(rows: list[tuple[float, ...]], seconds: list[float]) -> list[float]:
    """Least squares of the relative errors; nothing takes less than no time."""
    matrix = np.array(rows) / np.array(seconds)[:, None]
    used = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used], np.ones(len(rows)), rcond=None)
        if found.min() >= 0:
            by_column = dict(zip(used, found.tolist(), strict=True))
            return [by_column.get(column, 0.0) for column in range(matrix.shape[1])]
        del used[int(found.argmin())]


def exchange_here() -> Exchange:
    """The workers'."""
    config = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "hidden_size": HEADS * HEAD_SIZE,
        "torch_dtype": "bfloat16",
    }
    return make_exchange(parse_model(config), 1, 1, 1)


def setup_of(exchange: Exchange, moving: Moving, computing: PrefillSpeed) -> Setup:
    decode = DecodeSpeed(1e-3, 0.0, slots=1 << 20, tokens=1 << 40)  # has room for all
    costs = Costs(moving.bytes_per_s, moving.write_s, 0.0, moving.control_s, 0.0)
    return Setup(exchange, 1, 1, 1, computing, decode, costs)


def arrivals(row: Row, count: int, seed: int) -> list[Arrival]:
    """At the times at which the row's load, as it is meant to be, brings them."""
    random = np.random.default_rng(seed)
    token_s = max(row.speed.token_s, LAYERS * _TOKEN_BYTES / row.speed.link if row.speed.link else 0.0)
    gaps = random.exponential(_LENGTHS.mean * token_s / row.load, count)
    drawn = zip(np.cumsum(gaps).tolist(), _LENGTHS.draw(random, count), strict=True)
    return [Arrival(at, tokens, 1, 0) for at, tokens in drawn]


@dataclass(frozen=True)
class Compared:
    """Medians of some runs. `measured_after`, `simulated_after`: from the end of prefill until decode has all KV.
    `overslept`: by how much a step took longer than was to be slept, at most: what others took of the machine."""

    name: str
    load: float
    requests: int
    measured: Spread
    simulated: Spread
    measured_after: float
    simulated_after: float
    overslept: float

    @property
    def off(self) -> dict[str, float]:
        """Of the percentiles, most of which is queueing and computing that the simulator was told; and of what comes
        after prefill, which it has to know by itself."""
        ours, theirs = asdict(self.simulated), asdict(self.measured)
        off = {name: ours[name] / theirs[name] - 1 for name in ours}
        return off | {"after_prefill": self.simulated_after / self.measured_after - 1}

    @property
    def holds(self) -> bool:
        return all(abs(off) <= MAX_OFF for off in self.off.values())

    def text(self) -> str:
        columns = zip(asdict(self.measured).values(), asdict(self.simulated).values(), self.off.values(), strict=False)
        cells = "".join(f"{1000 * a:>11.1f}{1000 * b:>11.1f}{100 * off:>+5.0f}%" for a, b, off in columns)
        row = f"{self.name:>20}{self.load:>6.2f}{self.requests:>10}{cells}"
        row += f"{1000 * self.measured_after:>9.1f}{1000 * self.simulated_after:>11.1f}"
        row += f"{100 * self.off['after_prefill']:>+5.0f}%{1000 * self.overslept:>7.0f}"
        return row + ("" if self.holds else "   <- off")


def _middle(runs: list[Spread]) -> Spread:
    """Medians of runs' percentiles."""
    return Spread(*(median(column) for column in zip(*(asdict(run).values() for run in runs), strict=True)))


HEADER = (
    f"{'':>36}{'p50 (ms)':>28}{'p90 (ms)':>28}{'p99 (ms)':>28}{'after prefill (ms)':>26}{'late':>7}\n"
    f"{'':>20}{'load':>6}{'requests':>10}"
    + 3 * f"{'measured':>11}{'simulated':>11}{'off':>6}"
    + f"{'measured':>9}{'simulated':>11}{'off':>6}{'(ms)':>7}"
)


def validate(requests: int, rounds: int, seed: int, as_json: bool, check: bool, load_average: float) -> int:
    """`requests` of each row, in `rounds` runs that take turns with those of other rows and of requests alone."""
    alone = {speed: Alone(speed) for speed in dict.fromkeys(row.speed for row in ROWS)}
    coming = {(row, i): arrivals(row, -(-requests // rounds), seed + i) for row in ROWS for i in range(rounds)}
    measured: dict[Row, list[list[Times]]] = {row: [] for row in ROWS}
    with closing(Workers(1)) as pair:
        pair.serve([(0.0, 128)], Speed(0.0))  # the ranks meet
        for figures in alone.values():
            figures.measure(pair, 1, 5, computing=False)
    with ExitStack() as stack:
        # Ours learn how fast a link is; so each speed has its own.
        pairs = {speed: stack.enter_context(closing(Workers(LAYERS))) for speed in alone}
        for pair in pairs.values():
            pair.serve([(0.0, 128)], Speed(0.0))
        for i in range(rounds):
            for speed, figures in alone.items():
                if not figures.keeps_up:
                    figures.measure(pairs[speed], LAYERS, 2, computing=False)
                figures.measure(pairs[speed], LAYERS, 2, computing=True)
            for row in ROWS:
                requests_at = [(a.at, a.prompt) for a in coming[row, i]]
                measured[row].append(pairs[row.speed].serve(requests_at, row.speed))
    exchange, found = exchange_here(), []
    if not as_json:
        print(f"load average {load_average:.1f} before; from requests alone:")
    for speed, figures in alone.items():
        moving, computing = figures.moving(), figures.computing()
        if as_json:
            print(json.dumps({"measure": "alone", **asdict(moving), **asdict(computing), "load_average": load_average}))
        else:
            print(
                f"  slept {1e6 * speed.token_s:g} us a token: {1e6 * computing.token_s:.1f} us, and "
                f"{1000 * computing.step_s:.2f} ms a step; a message {1000 * moving.control_s:.2f} ms, a layer's write "
                f"{1000 * moving.write_s:.2f} ms and {moving.bytes_per_s / 1e9:.3f} GB/s"
            )
    if not as_json:
        print(HEADER)
    for row, runs in measured.items():
        figures = alone[row.speed]
        setup = setup_of(exchange, figures.moving(), figures.computing())
        seen = _middle([Spread.of([each.received for each in run]) for run in runs])
        played = [simulated(setup, coming[row, i]) for i in range(rounds)]
        compared = Compared(
            row.name,
            row.load,
            sum(map(len, runs)),
            seen,
            _middle([Spread.of([kv for kv, _ in run]) for run in played]),
            median(each.received - each.computed for run in runs for each in run),
            median(after for run in played for _, after in run),
            max(each.overslept for run in runs for each in run),
        )
        found.append(compared)
        shown = {"measure": "validation", **asdict(compared), "off": compared.off, "holds": compared.holds}
        print(json.dumps(shown) if as_json else compared.text(), flush=True)
    missed = sum(not compared.holds for compared in found)
    if missed:
        print(f"{missed} of {len(found)} rows are more than {100 * MAX_OFF:.0f} % off", file=sys.stderr)
    return 1 if check and missed else 0
