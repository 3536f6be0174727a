# SPDX-License-Identifier: Apache-2.0
"""Runs a cluster, and says what was seen and which side it is short of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .clock import Clock, Level
from .cluster import Cluster, Setup
from .engines import Request
from .traffic import Arrival

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """Percentiles, seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        return (
            cls(*(float(p) for p in np.percentile(seconds, PERCENTILES))) if len(seconds) else cls(*[float("nan")] * 3)
        )


@dataclass(frozen=True)
class Queue:
    """Requests that wait at one engine: on average, and at most at any."""

    mean: float
    longest: float


@dataclass(frozen=True)
class Figures:
    """What was seen of requests that arrived after the warm-up, and of that time. Shares are from 0 to 1."""

    requests: int
    failed: int
    ttft: Spread
    """From the client's request to its first token."""
    after_prefill: Spread
    """From the end of prefill until decode has all KV."""
    early: float
    """Share of the KV that was sent before prefill ended."""
    prefill_busy: float
    """Share of the time in which a prefill engine computes."""
    prefill_queue: Queue
    decode_busy: float
    """Requests in a decode engine, relative to its room."""
    decode_queue: Queue
    step_ms: float
    """A step of decode with that load."""
    p_link: float
    """Bytes that the NICs of prefill carried, relative to what they could."""
    d_link: float
    events: int
    took_s: float
    """Seconds of one processor, for `events`."""


class _Watch:
    """Reads a cluster's levels between two times."""

    def __init__(self, cluster: Cluster, begins: float, ends: float) -> None:
        self._cluster, self._seconds = cluster, ends - begins
        clock = cluster.clock
        clock.at(begins, self._begin)
        clock.at(ends, self._end)
        self.links: dict[str, list[float]] = {}

    def _levels(self) -> list[Level]:
        cluster = self._cluster
        prefill = [level for engine in cluster.prefill.values() for level in (engine.busy, engine.queue)]
        decode = [level for e in cluster.decode.values() for level in (e.held, e.queue, e.running)]
        return [*prefill, *decode]

    def _carried(self) -> dict[str, list[float]]:
        cluster = self._cluster
        sides = {"p": cluster.p_links, "d": cluster.d_links}
        carried = {}
        for name, links in sides.items():
            each = list(dict.fromkeys(link for of_engine in links.values() for link in of_engine))  # some share theirs
            cluster.network.settle(each)
            carried[name] = [link.carried for link in each]
        return carried

    def _begin(self) -> None:
        for level in self._levels():
            level.reset()
        self._before = self._carried()

    def _end(self) -> None:
        cluster = self._cluster
        capacity = cluster.setup.costs.nic * self._seconds
        for name, after in self._carried().items():
            pairs = zip(after, self._before[name], strict=True)
            self.links[name] = [(now - before) / capacity for now, before in pairs]
        prefill, decode = cluster.prefill.values(), cluster.decode.values()
        speed = cluster.setup.decode_speed
        self.prefill_busy = [engine.busy.mean for engine in prefill]
        self.prefill_queue = [(engine.queue.mean, engine.queue.maximum) for engine in prefill]
        self.decode_held = [engine.held.mean for engine in decode]
        self.decode_queue = [(engine.queue.mean, engine.queue.maximum) for engine in decode]
        self.steps = [speed.seconds(engine.running.mean) for engine in decode]


def run(setup: Setup, arrivals: Sequence[Arrival], warm_up: float, ends: float, cells: int = 1) -> Figures:
    """`arrivals` in the first `ends` seconds; those of the first `warm_up` seconds do not count. `cells`: so many
    clusters side by side, each with its own proxy; requests are dealt out at random."""
    begun = time.process_time()
    watches, counted, events = [], [], 0
    prompt = float(np.mean([arrival.prompt for arrival in arrivals])) if arrivals else 1.0
    output = float(np.mean([arrival.output for arrival in arrivals])) if arrivals else 1.0
    for cell in range(cells):
        clock = Clock()
        cluster = Cluster(clock, setup)
        watch = _Watch(cluster, warm_up, ends)
        for arrival in arrivals:
            if arrival.salt // setup.exchange.lanes % cells == cell:
                clock.at(arrival.at, cluster.arrive, arrival)
        clock.run()
        watches.append(watch)
        counted += [request for request in cluster.requests if request.arrival.at >= warm_up]
        events += clock.events
    room = setup.decode_speed.full(prompt, output)
    good = [request for request in counted if not request.failed]
    return Figures(
        requests=len(counted),
        failed=len(counted) - len(good),
        ttft=Spread.of([request.token_at - request.arrival.at for request in good]),
        after_prefill=Spread.of([request.received_at - request.prefilled_at for request in good]),
        early=_ratio(good),
        prefill_busy=float(np.mean([watch.prefill_busy for watch in watches])),
        prefill_queue=_queue([watch.prefill_queue for watch in watches]),
        decode_busy=float(np.mean([[held / room for held in watch.decode_held] for watch in watches])),
        decode_queue=_queue([watch.decode_queue for watch in watches]),
        step_ms=1000 * float(np.mean([watch.steps for watch in watches])),
        p_link=float(np.mean([watch.links["p"] for watch in watches])),
        d_link=float(np.mean([watch.links["d"] for watch in watches])),
        events=events,
        took_s=time.process_time() - begun,
    )


def simulated(setup: Setup, arrivals: Sequence[Arrival]) -> list[tuple[float, float]]:
    """Of each request, seconds until decode has all KV: from its ticket, from the end of prefill. Raises RuntimeError
    where one fails."""
    clock = Clock()
    cluster = Cluster(clock, setup)
    for arrival in arrivals:
        clock.at(arrival.at, cluster.arrive, arrival)
    clock.run()
    if failed := sum(request.failed for request in cluster.requests):
        raise RuntimeError(f"{failed} requests failed")
    return [(r.received_at - r.ticket_at, r.received_at - r.prefilled_at) for r in cluster.requests]


def _ratio(requests: Sequence[Request]) -> float:
    return sum(r.early for r in requests) / max(1.0, sum(r.nbytes for r in requests))


def _queue(values: Sequence[Sequence[tuple[float, float]]]) -> Queue:
    means, longest = np.array(values).reshape(-1, 2).T
    return Queue(float(means.mean()), float(longest.max()))


@dataclass(frozen=True)
class Advice:
    """Requests per second that each part can serve by itself, of one cell; which of them is the first to be full;
    and how many prefill engines one decode deployment keeps busy."""

    prefill: float
    decode: float
    p_links: float
    d_links: float
    full_first: str
    prefill_per_decode: float


def advise(setup: Setup, prompt: float, output: float) -> Advice:
    """For requests of `prompt` and `output` tokens."""
    exchange, speed = setup.exchange, setup.decode_speed
    full = speed.full(prompt, output)
    units = -(-prompt // exchange.unit)
    nbytes = units * exchange.unit_bytes

    def links(by_lane: Sequence[tuple[tuple[int, float], ...]], engines: int) -> float:
        """Requests spread over lanes and engines."""
        passing: dict[int, float] = {}
        for loads in by_lane:
            for kind, part in loads:
                passing[kind] = passing.get(kind, 0.0) + part / len(by_lane)
        return engines * setup.costs.nic / (nbytes * max(passing.values()))

    rates = {
        "prefill": setup.prefill / setup.prefill_speed.prompt_s(prompt),
        "decode": setup.decode_engines * full / (output * speed.seconds(full)),
        "p_links": links(exchange.p_loads, setup.prefill) / exchange.engines_per_nic(exchange.prefill),
        "d_links": links(exchange.d_loads, setup.decode_engines) / exchange.engines_per_nic(exchange.decode),
    }
    ratio = (rates["decode"] / setup.decode) / (rates["prefill"] / setup.prefill)
    return Advice(**rates, full_first=min(rates, key=lambda part: rates[part]), prefill_per_decode=ratio)
