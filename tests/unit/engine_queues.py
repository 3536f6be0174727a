# SPDX-License-Identifier: Apache-2.0
"""Discrete-event simulations of engines behind a strategy. Seeded, in simulated seconds: no clock, no I/O."""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_ascend_pd.proxy.routing.load import EngineLoad
from vllm_ascend_pd.proxy.routing.strategies import PromptEstimate, Strategy

BLOCK = 128


class Job(NamedTuple):
    at: float
    prompt: PromptEstimate
    output: int = 0


class Waits(NamedTuple):
    """Seconds from a request's arrival until an engine begins with it."""

    mean: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Waits:
        return cls(sum(seconds) / len(seconds), sorted(seconds)[int(0.95 * len(seconds))])

    def at_most(self, share: float, other: Waits) -> bool:
        return self.mean <= share * other.mean and self.p95 <= share * other.p95


def arrivals(
    seed: int, number: int, rate: float, make: Callable[[random.Random], tuple[PromptEstimate, int]]
) -> list[Job]:
    """Poisson, `rate` per second."""
    chance, now, jobs = random.Random(seed), 0.0, []
    for _ in range(number):
        now += chance.expovariate(rate)
        jobs.append(Job(now, *make(chance)))
    return jobs


def prompt(tokens: int, shared: int = 0, group: int = 0, unique: int = 0) -> PromptEstimate:
    """Of whole blocks: the first `shared` tokens are those of all its group."""
    blocks = tokens // BLOCK
    keys = tuple(hash((group, i)) if i < shared // BLOCK else hash((group, unique, i, -7)) for i in range(blocks))
    return PromptEstimate(tokens, keys, BLOCK if keys else 0.0)


class _PrefillEngine:
    """Computes one prompt after the other, `speed` tokens per second; keeps the blocks it used last."""

    def __init__(self, speed: float, cache_blocks: int) -> None:
        self.speed = speed
        self.free_at = 0.0
        self._blocks = cache_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()

    def run(self, job: Job) -> tuple[float, float]:
        """When it begins, and when it is done."""
        begin = max(job.at, self.free_at)
        known = next((i for i, key in enumerate(job.prompt.keys) if key not in self._cached), len(job.prompt.keys))
        self.free_at = begin + (job.prompt.tokens - known * BLOCK) / self.speed
        for key in reversed(job.prompt.keys):
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > self._blocks:
            self._cached.popitem(last=False)
        return begin, self.free_at


def prefill_waits(strategy: Strategy, jobs: Sequence[Job], engines: int = 4, cache_blocks: int = 2000) -> Waits:
    """The proxy knows what it has sent and not had answered: prompt tokens, less those it takes to be cached."""
    servers = {f"p{i}": _PrefillEngine(10_000, cache_blocks) for i in range(engines)}
    tokens: Counter[str] = Counter()
    done: list[tuple[float, str, int]] = []
    waits = []
    for job in jobs:
        while done and done[0][0] <= job.at:
            _, url, new = heapq.heappop(done)
            tokens[url] -= new
        best = strategy.order(job.prompt, [EngineLoad(url, 0, tokens[url]) for url in servers])[0]
        new = strategy.sent(job.prompt, best)
        tokens[best] += new
        begin, end = servers[best].run(job)
        heapq.heappush(done, (end, best, new))
        waits.append(begin - job.at)
    return Waits.of(waits)


class _DecodeEngine:
    """Takes a request when its KV fits; a step takes longer with each request and each token of KV."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held = 0
        self.running = 0
        self.queue: deque[Job] = deque()

    def begin(self) -> list[tuple[Job, float]]:
        """Who begins now, and for how many seconds it runs."""
        begun = []
        while self.queue and self.held + _kv(self.queue[0]) <= self.room:
            job = self.queue.popleft()
            self.held += _kv(job)
            self.running += 1
            begun.append((job, job.output * (0.02 + 2e-4 * self.running + 1e-7 * self.held)))
        return begun


def _kv(job: Job) -> int:
    return job.prompt.tokens + job.output


def decode_waits(strategy: Strategy, jobs: Sequence[Job], rooms: Sequence[int]) -> Waits:
    """The proxy knows rooms, and the requests and prompt tokens that it has sent and that have not ended."""
    servers = {f"d{i}": _DecodeEngine(room) for i, room in enumerate(rooms)}
    requests: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    events: list[tuple[float, int, str, Job, int]] = []
    waits: list[float] = []
    number = 0

    def begin(url: str, now: float) -> None:
        nonlocal number
        for job, seconds in servers[url].begin():
            waits.append(now - job.at)
            number += 1
            heapq.heappush(events, (now + seconds, number, url, job, job.prompt.tokens))

    def end_until(now: float) -> None:
        while events and events[0][0] <= now:
            at, _, url, job, sent = heapq.heappop(events)
            servers[url].held -= _kv(job)
            servers[url].running -= 1
            requests[url] -= 1
            tokens[url] -= sent
            begin(url, at)

    for job in jobs:
        end_until(job.at)
        loads = [EngineLoad(url, requests[url], tokens[url], engine.room) for url, engine in servers.items()]
        best = strategy.order(job.prompt, loads)[0]
        strategy.sent(job.prompt, best)
        requests[best] += 1
        tokens[best] += job.prompt.tokens
        servers[best].queue.append(job)
        begin(best, job.at)
    end_until(float("inf"))
    return Waits.of(waits)
