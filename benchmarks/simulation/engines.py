# SPDX-License-Identifier: Apache-2.0
"""Engines: prefill computes its prompts step by step, decode all of its requests at once."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .clock import Clock, Level
from .traffic import Arrival


@dataclass(frozen=True)
class PrefillSpeed:
    """A step of `n` tokens takes `step_s + n * token_s`; it has at most `step_tokens`, of as many prompts as fit."""

    token_s: float
    step_s: float
    step_tokens: int

    def seconds(self, tokens: float) -> float:
        return self.step_s + tokens * self.token_s

    def prompt_s(self, tokens: float) -> float:
        """What a prompt takes of an engine that always has enough to do."""
        return tokens * self.token_s + self.step_s * tokens / self.step_tokens


@dataclass(frozen=True)
class DecodeSpeed:
    """A step takes `step_s + n * request_s` with `n` requests in the engine, which has at most `slots` of them, of
    `tokens` tokens in all."""

    step_s: float
    request_s: float
    slots: int
    tokens: int

    def seconds(self, requests: float) -> float:
        return self.step_s + requests * self.request_s

    def full(self, prompt: float, output: float) -> float:
        """How many requests an engine has when it is full."""
        return min(self.slots, self.tokens / (prompt + output))


@dataclass(eq=False)
class Request:
    """What became of it and when. `computed`: tokens of its prompt."""

    arrival: Arrival
    decode: DecodeEngine | None = None
    transfer: object = None
    computed: int = 0
    nbytes: float = 0.0
    early: float = 0.0
    ticket_at: float = math.nan
    step_at: float = math.nan
    prefilled_at: float = math.nan
    received_at: float = math.nan
    token_at: float = math.nan
    ended_at: float = math.nan
    failed: bool = False


@dataclass(frozen=True)
class Piece:
    """Tokens `[start, stop)` of a request, computed in one step."""

    request: Request
    start: int
    stop: int

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == self.request.arrival.prompt


@dataclass(eq=False)
class PrefillEngine:
    """First come, first served. `begun(engine, pieces, seconds)` is told of each step, `computed(engine, pieces)` when
    it is over."""

    name: str
    clock: Clock
    speed: PrefillSpeed
    begun: Callable[[PrefillEngine, list[Piece], float], None]
    computed: Callable[[PrefillEngine, list[Piece]], None]
    waiting: deque[Request] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.busy = Level(self.clock)
        self.queue = Level(self.clock)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.queue.add(1)
        if not self.busy.value:
            self._step()

    def _step(self) -> None:
        room = self.speed.step_tokens
        pieces = []
        while room and self.waiting:
            request = self.waiting[0]
            tokens = min(room, request.arrival.prompt - request.computed)
            pieces.append(Piece(request, request.computed, request.computed + tokens))
            if request.computed == 0:
                self.queue.add(-1)
            request.computed += tokens
            room -= tokens
            if request.computed == request.arrival.prompt:
                self.waiting.popleft()
        if not pieces:
            return
        self.busy.add(1)
        seconds = self.speed.seconds(self.speed.step_tokens - room)
        self.begun(self, pieces, seconds)
        self.clock.after(seconds, self._over, pieces)

    def _over(self, pieces: list[Piece]) -> None:
        self.busy.add(-1)
        self.computed(self, pieces)
        if not self.busy.value:
            self._step()


@dataclass(eq=False)
class DecodeEngine:
    """Requests are admitted in turn while there is room for their prompt and output: `admitted(request)`; between two
    steps, as vLLM schedules, and at once where none is under way. Once their KV is there all make one token a step:
    `token(request)` tells of the first, `ended(request)` of the last."""

    name: str
    clock: Clock
    speed: DecodeSpeed
    admitted: Callable[[Request], None]
    token: Callable[[Request], None]
    ended: Callable[[Request], None]
    waiting: deque[Request] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.queue = Level(self.clock)
        self.held = Level(self.clock)  # requests admitted
        self.running = Level(self.clock)  # those that generate
        self._tokens = 0
        self._steps = 0.0  # made so far
        self._at = 0.0
        self._due: list[tuple[float, int, bool, Request]] = []  # (number of steps, order, whether it is the last)
        self._admit_at = math.inf  # number of steps
        self._order = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.queue.add(1)
        self._schedule()

    def _schedule(self) -> None:
        """Something has come, or there is more room."""
        if not self.running.value:
            self._admit()
            return
        self._advance()
        self._admit_at = float(math.ceil(self._steps - 1e-9))
        self._plan()

    def _admit(self) -> None:
        while self.waiting and self.held.value < self.speed.slots:
            tokens = self._size(self.waiting[0])
            if self.held.value and self._tokens + tokens > self.speed.tokens:
                return
            request = self.waiting.popleft()
            self.queue.add(-1)
            self.held.add(1)
            self._tokens += tokens
            self.admitted(request)

    def _size(self, request: Request) -> int:
        return request.arrival.prompt + request.arrival.output

    def run(self, request: Request) -> None:
        """Its KV is there: it takes part from the next step on."""
        self._advance()
        first = math.ceil(self._steps - 1e-9) + 1
        if not self.running.value:  # there is no step to wait for
            self._steps = float(first - 1)
        self.running.add(1)
        self._put(first, False, request)
        self._put(first + request.arrival.output - 1, True, request)
        self._plan()

    def leave(self, request: Request) -> None:
        """It has no blocks any more."""
        self._free(request)
        self._schedule()

    def _free(self, request: Request) -> None:
        self.held.add(-1)
        self._tokens -= self._size(request)

    def _put(self, step: float, last: bool, request: Request) -> None:
        self._order += 1
        heapq.heappush(self._due, (step, self._order, last, request))

    def _advance(self) -> None:
        now = self.clock.now
        if self.running.value:
            self._steps += (now - self._at) / self.speed.seconds(self.running.value)
        self._at = now

    def _next(self) -> float:
        return min(self._admit_at, self._due[0][0] if self._due else math.inf)

    def _plan(self) -> None:
        """One event, for what is next; those planned before count no more."""
        self._order += 1
        if (then := self._next()) < math.inf:
            steps = max(0.0, then - self._steps)
            self.clock.after(steps * self.speed.seconds(self.running.value), self._reached, self._order)

    def _reached(self, order: int) -> None:
        """The end of a step."""
        if order != self._order:
            return
        self._advance()
        self._steps = max(self._steps, self._next())
        over = []
        while self._due and self._due[0][0] <= self._steps + 1e-9:
            _, _, last, request = heapq.heappop(self._due)
            if last:
                self.running.add(-1)
                over.append(request)
            else:
                self.token(request)
        for request in over:
            self.ended(request)
            self._free(request)
        self._admit_at = math.inf
        self._admit()
        self._plan()
