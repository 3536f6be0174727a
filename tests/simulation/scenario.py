# SPDX-License-Identifier: Apache-2.0
"""What happens in a run. A scenario is drawn from a seed, or written down: its `repr` is the Python that makes it."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

BLOCK = 16
LONGEST = 160
"""Tokens of the longest prompt."""
MAX_MODEL_LEN = 192
_ROOM = 80
"""Blocks of a large engine."""
LOSSES = ("before", "during", "after", "reported")
"""How a step fails on a rank: it hears nothing of it, its forward pass fails, or its output gets lost, without what it
reports or with it."""


@dataclass(frozen=True)
class Shape:
    """The engines."""

    prefills: int = 1
    decodes: int = 1
    # Tensor-parallel ranks of each.
    prefill_tp: int = 1
    decode_tp: int = 1
    # KV heads of the model.
    heads: int = 4
    # Pipeline stages of each, and ranks of decode's context parallelism.
    prefill_pp: int = 1
    decode_pp: int = 1
    decode_dcp: int = 1
    # Tokens that the layers of each further cache group see, and whether one more group has states.
    windows: tuple[int, ...] = ()
    states: bool = False
    # Whether decode never computes a prompt (`who_computes`).
    never: bool = False
    # Prompts of which prefill computes more tokens are computed before decode gives them blocks. "auto": the proxy says
    # which.
    prefill_first: int | Literal["auto"] | None = None
    # Whether all KV is compared with prefill's checksums (`verify_kv`).
    verify: bool = False
    # Whether the cluster has a secret.
    secret: bool = False
    # KV blocks of each engine.
    prefill_blocks: int = 60
    decode_blocks: int = 60
    # Steps in flight. More than one on decode means vLLM's AsyncScheduler.
    prefill_steps: int = 1
    decode_steps: int = 1
    # Tokens that decode drafts in each step, some of which it rejects.
    drafts: int = 0
    prefix_caching: bool = True
    # Whether a pool beside ours has KV of prompts, in a MultiConnector on prefill.
    pool: bool = False
    # Whether clients and decode engines talk to our proxy. Otherwise a model stands in its place, which never retries.
    proxy: bool = False
    # The proxy's `--max-per-prefill`.
    max_per_prefill: int | None = None
    # Whether engines go on after a step that failed, as with vLLM 0.33's --enable-fault-tolerance.
    survives_faults: bool = False
    # `kv_load_failure_policy`.
    prefill_policy: str = "fail"
    decode_policy: str = "fail"


@dataclass(frozen=True)
class Faults:
    """How often things go wrong by themselves. Shares are in [0, 1]."""

    # Share of looks at the clock at which another thread runs.
    interrupts: float = 0.0
    # Shares of messages that are lost, that arrive twice, and that are late.
    loss: float = 0.0
    repetition: float = 0.0
    delay: float = 0.0
    # Share of batches that fail. Some of their bytes arrive later.
    write_fails: float = 0.0
    # Share of batches that take `slow_by` times as long.
    slow: float = 0.0
    slow_by: float = 1.0
    # Whether bytes that came while a rank was stopped are applied some time after it has gone on.
    late_bytes: bool = False
    # Share of a pool's loads that fail.
    load_fails: float = 0.0
    # Share of tickets that prefill gets with another prompt, and share that go to two prefill engines.
    other_prompt: float = 0.0
    two_prefills: float = 0.0
    # Share of prompts without a ticket that a router hands to decode about `hold_timeout_s` after prefill's answer.
    late: float = 0.0
    # Share of HTTP requests that the proxy or an engine answers wrongly or not at all, or that lose their connection.
    http: float = 0.0


@dataclass(frozen=True)
class Event:
    """Something that comes from outside. `what`: a method of `World`, which gets `args`.

    Where an argument chooses one of several, it is a share in [0, 1), so that it fits every shape.
    """

    at: float
    what: str
    args: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"Event({self.at!r}, {self.what!r}, {self.args!r})"


@dataclass(frozen=True)
class Scenario:
    seed: int
    shape: Shape = field(default_factory=Shape)
    faults: Faults = field(default_factory=Faults)
    events: tuple[Event, ...] = ()

    def __repr__(self) -> str:
        events = "".join(f"\n        {each!r}," for each in self.events)
        return (
            f"Scenario(\n    seed={self.seed},\n    shape={_short(self.shape)},\n    faults={_short(self.faults)},\n"
            f"    events=({events}\n    ),\n)"
        )

    @property
    def requests(self) -> list[str]:
        """Names of the requests that clients make."""
        return [each.args[0] for each in self.events if each.what == "request"]


def _short(value: Any) -> str:
    """As `repr`, without what is as usual."""
    usual = type(value)()
    said = {each.name: getattr(value, each.name) for each in fields(value)}
    parts = [f"{name}={it!r}" for name, it in said.items() if it != getattr(usual, name)]
    return f"{type(value).__name__}({', '.join(parts)})"


def prompt(family: int, length: int) -> list[int]:
    """Returns token ids. Prompts of one family share a prefix."""
    return random.Random(f"prompt {family}").choices(range(1, 1_000_000), k=LONGEST)[:length]


def draw(seed: int, calm: bool = False, **fixed: Any) -> Scenario:
    """Draws a scenario. `fixed`: fields of `Shape` and `Faults`, and `requests`, that are not drawn.

    `calm`: nothing goes wrong, and there is room for all requests, so each must have its answer.
    """
    rng = random.Random(f"scenario {seed}")
    shape = replace(
        _draw_shape(rng),
        drafts=random.Random(f"drafts {seed}").choice([0, 0, 0, 1, 3]),
        prefill_first=random.Random(f"prefill first {seed}").choice([None, "auto", 0, 30, 80]),
        max_per_prefill=random.Random(f"slots {seed}").choice([None, None, 1, 4]),
    )
    faults = _draw_faults(rng, shape)
    names = {each.name for each in fields(Shape)}
    requests = fixed.pop("requests", None)
    shape = replace(shape, **{name: value for name, value in fixed.items() if name in names})
    shape = _possible(replace(shape, prefill_blocks=_ROOM, decode_blocks=_ROOM) if calm else shape)
    faults = Faults() if calm else faults
    faults = replace(faults, **{name: value for name, value in fixed.items() if name not in names})
    events = _draw_events(rng, shape, requests)
    return Scenario(seed, shape, faults, tuple(each for each in events if each.what == "request" or not calm))


def _draw_shape(rng: random.Random) -> Shape:
    two = rng.random() < 0.4
    prefill_tp, decode_tp = rng.choice(
        [(1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (2, 2), (1, 2), (4, 1), (4, 2), (2, 4), (1, 4)]
    )
    pool = rng.random() < 0.2
    return Shape(
        prefills=1 + two,
        decodes=1 + two,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_pp=rng.choice([1, 1, 1, 1, 2]),
        decode_pp=rng.choice([1, 1, 1, 1, 2]),
        decode_dcp=rng.choice([1, 1, 2]),
        heads=rng.choice([4, 4, 4, 2, 1]),
        windows=rng.choice([(), (), (), (24,), (40,)]),
        states=rng.random() < 0.15,
        never=rng.random() < 0.2,
        verify=rng.random() < 0.2,
        secret=rng.random() < 0.2,
        prefill_blocks=rng.choice([16, 30, _ROOM]),
        decode_blocks=rng.choice([16, 30, _ROOM]),
        prefill_steps=rng.choice([1, 1, 2]),
        decode_steps=rng.choice([1, 1, 2]),
        prefix_caching=rng.random() < 0.8,
        pool=pool,
        proxy=rng.random() < 0.3,
        prefill_policy=rng.choice(["fail", "recompute"]),
        decode_policy=rng.choice(["fail", "recompute"]),
    )


def _possible(shape: Shape) -> Shape:
    """Returns the shape without what engines refuse at start."""
    if shape.survives_faults:  # refused beside other connectors; and vLLM's pipelines would hang
        shape = replace(shape, pool=False, prefill_pp=1, decode_pp=1)
    if shape.pool:  # harness/taken_back.py knows one cache group
        shape = replace(shape, windows=(), states=False)
    if shape.windows or shape.states or shape.never:
        shape = replace(shape, prefill_first=None)
    if shape.windows or shape.states:
        # Such caches cannot be computed again in part, and vLLM wants room for one request of the longest.
        blocks = {"prefill_blocks": max(30, shape.prefill_blocks), "decode_blocks": max(30, shape.decode_blocks)}
        shape = replace(shape, decode_policy="fail", **blocks)
    if shape.states:  # each drafted token needs a state of its own
        shape = replace(shape, drafts=0)
    if shape.windows or shape.states or shape.decode_tp == 1:
        return replace(shape, decode_dcp=1)
    # Ranks of context parallelism have the same heads.
    return replace(shape, heads=shape.decode_tp // 2) if shape.decode_dcp > 1 else shape


def _draw_faults(rng: random.Random, shape: Shape) -> Faults:
    """Most rates are 0, so that each fault also comes alone. Some are extreme."""
    return Faults(
        interrupts=rng.choice([0.0, 0.0, 0.02]),
        loss=rng.choice([0.0, 0.0, 0.0, 0.05]),
        repetition=rng.choice([0.0, 0.0, 0.2]),
        delay=rng.choice([0.0, 0.0, 0.05, 0.5]),
        write_fails=rng.choice([0.0, 0.0, 0.02, 0.2]),
        slow=rng.choice([0.0, 0.1, 0.5]),
        slow_by=rng.choice([5.0, 50.0]),
        late_bytes=rng.random() < 0.5,
        load_fails=rng.choice([0.1, 0.5]) if shape.pool else 0.0,
        other_prompt=rng.choice([0.0, 0.0, 0.0, 0.1]),
        two_prefills=rng.choice([0.0, 0.0, 0.3]) if shape.prefills > 1 else 0.0,
        late=rng.choice([0.0, 0.0, 0.0, 0.3]),
        http=rng.choice([0.0, 0.05, 0.3]) if shape.proxy else 0.0,
    )


def _draw_events(rng: random.Random, shape: Shape, requests: int | None) -> tuple[Event, ...]:
    number, gap_s = requests or rng.choice([10, 30, 60]), rng.choice([0.0005, 0.003, 0.01])
    longest, leaves = rng.choice([20, 60, LONGEST]), rng.choice([0.0, 0.1, 0.4])
    held_share = rng.choice([0.0, 0.3, 0.8])
    events: list[Event] = []
    now = 0.0
    for n in range(number):
        name = f"r{n}"
        length = rng.choice(
            [rng.randint(1, BLOCK), rng.randint(2, longest), BLOCK * rng.randint(1, math.ceil(longest / BLOCK) - 1)]
        )
        family = rng.choice([100 + n, 100 + n, 0, 1])
        route = "prefill first" if rng.random() < held_share else "metaserver"
        pooled = BLOCK * rng.randint(0, (length - 1) // BLOCK) if shape.pool and rng.random() < 0.5 else 0
        events.append(_event(now, "request", name, family, length, rng.randint(1, 5), route, pooled))
        if rng.random() < leaves:
            events.append(_event(now + 0.05 * rng.random(), "leave", name))
        now += rng.expovariate(1 / gap_s)
    faults = (
        ("stop", (0.0, 3.0, 15.0), lambda: (_share(rng), rng.choice([0.02, 0.2, 2.0, 20.0]))),
        ("reset", (0.0, 0.0, 5.0, 50.0), lambda: (_share(rng),)),
        ("cut", (0.0, 0.0, 3.0), lambda: (_share(rng),)),
        ("part", (0.0, 0.0, 1.0), lambda: (_share(rng), _share(rng), rng.choice([0.2, 2.0, 10.0]))),
        ("kill", (0.0, 0.0, 0.0, 1.0), lambda: (_share(rng), rng.choice([0.1, 2.0]))),
        ("upgrade", (0.0, 0.0, 0.0, 1.0), lambda: (_share(rng), rng.choice([0.1, 2.0]))),
        ("jump", (0.0, 0.0, 5.0), lambda: (_share(rng), rng.choice([-100.0, -20.0, 20.0, 100.0]))),
        ("weights", (0.0, 0.0, 0.0, 0.0, 1.0), lambda: (rng.choice([0.0, 0.01, 0.3]),)),
        ("sleep", (0.0, 0.0, 0.0, 0.0, 1.0), lambda: (_share(rng), rng.choice([0.1, 1.0]))),
    )
    for what, rates, args in faults:
        rate, at = rng.choice(rates), 0.0  # per second of load, with at least one chance
        while rate and (at := at + rng.expovariate(rate)) < max(now, 0.3):
            events.append(_event(at, what, *args()))
    if shape.survives_faults:
        events += _draw_lost_steps(random.Random(f"lost steps {rng.random()}"), max(now, 0.3))
    return tuple(sorted(events, key=lambda each: each.at))


def _draw_lost_steps(rng: random.Random, seconds: float) -> Iterator[Event]:
    """How a step fails is drawn for each rank: before, while or after the rank runs it, with its report or without, or
    not at all (`Rank.run`)."""
    at, rate = 0.0, rng.choice([1.0, 3.0, 20.0])
    while (at := at + rng.expovariate(rate)) < seconds:
        kinds = [kind for kind in LOSSES if rng.random() < 0.5] or ["before"]
        failing = [rng.choice(kinds) for _ in range(4)]
        failing[rng.randrange(4)] = ""
        yield _event(at, "lose_step", _share(rng), *failing, rng.choice([0.001, 0.1, 2.0]))


def _event(at: float, what: str, *args: Any) -> Event:
    return Event(round(at, 4), what, args)


def _share(rng: random.Random) -> float:
    return rng.randrange(1000) / 1000
