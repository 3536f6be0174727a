# SPDX-License-Identifier: Apache-2.0
"""Limits how many requests each engine has at a time, and how many the proxy serves; the others wait in queues.

An engine's limit is the operator's, or what it has room for when it answers that it is busy. All of this runs in the
event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

import anyio

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.messages import RequestRefused
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine

_FIRST_PAUSE_SECONDS = 0.1
"""After so many seconds a busy engine is tried with more requests. The time doubles while it stays busy."""
_LONGEST_PAUSE_SECONDS = 5.0


class NoFreeSlotError(Exception):
    """The queue is full, or no slot became free in time. The message names the limit."""


class RequestGroup:
    """The prefills of one client request. They hold one place in the queue, and take turns with other groups."""

    def __init__(self) -> None:
        self.granted = 0
        """Slots at engines that its members have been given so far."""


class ConcurrencyLimiter:
    """Gives requests slots at the engines of one role, and queues requests for which no engine has a free slot.

    The event loop's thread owns it.
    """

    def __init__(self, limit: int | None, queue_per_engine: int, timeout: float, in_all: int | None = None) -> None:
        """
        Args:
            limit: slots per engine; None: no limit.
            queue_per_engine: how many groups may wait, for each engine that they could use.
            timeout: seconds that a group waits before it is refused.
            in_all: slots at all engines together; None: no limit.
        """
        self.limit = limit
        self._in_all = in_all
        self._queue_per_engine = queue_per_engine
        self.timeout = timeout
        self._used: Counter[RegisteredEngine] = Counter()
        """Slots in use. Engines without any have no entry: they may have been removed."""
        self._total = 0
        """Slots in use at all engines."""
        self._readmitted: dict[_Waiter, None] = {}
        """Requests that had a slot before, in order. They are served before the queue."""
        self._queue: dict[RequestGroup, dict[_Waiter, None]] = {}
        """Groups in the order of their turns, each with its waiting members in order."""
        self._rooms: dict[RegisteredEngine, _RoomAtEngine] = {}
        """Of engines that were busy lately."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(1 for _ in self._waiters())

    def in_use(self, engine: RegisteredEngine) -> int:
        """Slots in use at an engine."""
        return self._used[engine]

    def is_busy(self, engine: RegisteredEngine) -> bool:
        """Whether the engine has lately answered that it is busy."""
        return engine in self._rooms

    @owned
    async def acquire(
        self,
        engines: Sequence[RegisteredEngine],
        admitted: bool = False,
        avoid: Collection[str] = (),
        group: RequestGroup | None = None,
        waited: float = 0.0,
    ) -> RegisteredEngine | None:
        """Takes a slot at one of `engines`, and waits for one if none is free. Give it back by `releasing`.

        Engines that become available while the request waits are used too.

        Args:
            engines: in order of preference.
            admitted: whether the request had a slot before. It then waits before the queue, even if that is full.
            avoid: URLs of engines not to use, should they become available meanwhile.
            group: what the request belongs to; None: it is a group of its own. A group is refused as a whole or not
                at all: once a member has had a slot, the others count in no limit and wait without a timeout.
            waited: seconds that the request has waited already, for engines that are gone.

        Returns:
            The engine. None: ask again for other engines, because these, or the one whose slot this request was given,
            may get no more requests.

        Raises:
            NoFreeSlotError: the queue is full, or the timeout has passed.
        """
        group = group or RequestGroup()
        for engine in engines:
            if engine.open and self._has_free_slot(engine):
                self._occupy(group, engine)
                return engine
        waiter = _Waiter(engines, avoid, group)
        if not waiter.has_open_engine:
            return None
        if not (admitted or self._may_wait(group, len(engines))):
            raise NoFreeSlotError(f"{self._queue_per_engine * len(engines)} requests already wait")
        queue = self._readmitted if admitted else self._queue.setdefault(group, {})
        queue[waiter] = None
        try:
            with anyio.move_on_after(self.timeout - waited):
                await waiter.wait()
            if waiter.engine is None and group.granted:
                await waiter.wait()
            if waiter.engine is not None and not waiter.engine.open:  # it closed in the same turn of the event loop
                self._give_back(waiter)
                return None
        except BaseException:
            self._give_back(waiter)
            raise
        finally:
            queue.pop(waiter)
            if not (queue or admitted):
                del self._queue[group]
        if waiter.engine is None and waiter.has_open_engine:
            raise NoFreeSlotError(f"no slot became free within {self.timeout:g} s (--queue-timeout)")
        return waiter.engine

    @owned
    @contextmanager
    def releasing(self, engine: RegisteredEngine) -> Iterator[None]:
        """Gives back a slot from `acquire` at the end of the `with` block."""
        try:
            yield
        finally:
            self._release(engine)

    @owned
    def busy(self, engine: RegisteredEngine, group: RequestGroup | None = None) -> None:
        """An engine has answered a request, which still holds its slot, that it is busy.

        The others that it has are as many as it has room for. Further ones wait until one of these ends, or until a
        growing pause is over. `group`: the request's; its slot does not count as one that it has had.
        """
        if group is not None:
            group.granted -= 1
        if engine.open:
            room = self._rooms.setdefault(engine, _RoomAtEngine())
            room.limit, room.is_full = self._used[engine] - 1, True
            if room.timer is None:
                room.timer = asyncio.get_running_loop().call_later(room.pause, self._widen, engine)

    def _widen(self, engine: RegisteredEngine) -> None:
        """Tries an engine that was busy with more requests, until there are no more."""
        room = self._rooms[engine]
        if not room.is_full and self._used[engine] < room.limit:
            del self._rooms[engine]
        else:
            room.pause = min(2 * room.pause, _LONGEST_PAUSE_SECONDS) if room.is_full else _FIRST_PAUSE_SECONDS
            room.limit += max(1, room.limit // 2)
            room.is_full = False
            room.timer = asyncio.get_running_loop().call_later(room.pause, self._widen, engine)
        self.assign_slots(engine)

    @owned
    def engine_opened(self, engine: RegisteredEngine) -> None:
        """Lets waiting requests use an engine that may get requests from now on."""
        for waiter in self._waiters():
            if engine.url not in waiter.avoid:
                waiter.engines.add(engine)
        self.assign_slots(engine)

    @owned
    def engine_closed(self, engine: RegisteredEngine) -> None:
        """Ends waits for an engine that gets no more requests, if it was the only one."""
        if (room := self._rooms.pop(engine, None)) is not None and room.timer is not None:
            room.timer.cancel()
        for waiter in self._waiters():
            if engine in waiter.engines:
                waiter.changed.set()

    @owned
    def assign_slots(self, engine: RegisteredEngine) -> None:
        """Gives an engine's free slots to requests that wait for it."""
        while engine.open and self._has_free_slot(engine) and (waiter := self._next_waiter(engine)) is not None:
            self._occupy(waiter.group, engine)
            waiter.engine = engine
            waiter.changed.set()

    def _next_waiter(self, engine: RegisteredEngine) -> _Waiter | None:
        """The request whose turn it is at an engine. Its group goes to the end of the queue."""
        for waiter in self._waiters():
            if waiter.engine is None and engine in waiter.engines:
                if waiter.group in self._queue:
                    self._queue[waiter.group] = self._queue.pop(waiter.group)
                return waiter
        return None

    def _may_wait(self, group: RequestGroup, engines: int) -> bool:
        if group.granted or group in self._queue:
            return True
        return sum(not other.granted for other in self._queue) < self._queue_per_engine * engines

    def _has_free_slot(self, engine: RegisteredEngine) -> bool:
        used, room = self._used[engine], self._rooms.get(engine)
        if self._total == self._in_all:
            return False
        return (self.limit is None or used < self.limit) and (room is None or used < room.limit)

    def _occupy(self, group: RequestGroup, engine: RegisteredEngine) -> None:
        self._used[engine] += 1
        self._total += 1
        group.granted += 1

    def _give_back(self, waiter: _Waiter) -> None:
        """Gives a slot back that a request was given and does not use."""
        if waiter.engine is not None:
            waiter.group.granted -= 1
            self._release(waiter.engine)

    def _release(self, engine: RegisteredEngine) -> None:
        were_all_used = self._total == self._in_all
        self._total -= 1
        self._used[engine] -= 1
        if not self._used[engine]:
            del self._used[engine]
        self.assign_slots(engine)
        if were_all_used and self._total != self._in_all:  # nobody waits for this engine
            for other in {each for waiter in self._waiters() for each in waiter.engines}:
                self.assign_slots(other)

    def _waiters(self) -> Iterator[_Waiter]:
        """All waiting requests, in the order in which they get slots."""
        yield from self._readmitted
        for members in self._queue.values():
            yield from members


class _RoomAtEngine:
    """How many requests an engine takes, by its own answers. Only `ConcurrencyLimiter` changes it."""

    def __init__(self) -> None:
        self.limit = 0
        """Requests of this proxy."""
        self.is_full = False
        """Whether it was busy since `limit` was last raised."""
        self.pause = _FIRST_PAUSE_SECONDS
        """Seconds until `limit` is raised."""
        self.timer: asyncio.TimerHandle | None = None


class _Waiter:
    """One waiting request."""

    def __init__(self, engines: Sequence[RegisteredEngine], avoid: Collection[str], group: RequestGroup) -> None:
        self.engines = set(engines)
        """Engines that it may use."""
        self.avoid = avoid
        """URLs of engines that it must not use, should they become available."""
        self.group = group
        self.engine: RegisteredEngine | None = None
        """The engine at which it was given a slot."""
        self.changed = anyio.Event()
        """Set when `engine` or the state of `engines` has changed. Replaced at each wait."""

    @property
    def has_open_engine(self) -> bool:
        """Whether any of its engines may still get requests."""
        return any(engine.open for engine in self.engines)

    async def wait(self) -> None:
        """Returns when it was given a slot, or has no engine left to wait for."""
        while self.engine is None and self.has_open_engine:
            self.changed = anyio.Event()
            await self.changed.wait()


class RequestAdmission:
    """Serves `limit` client requests at a time. Up to `queue_length` more wait, in order.

    A request asks for a slot when its body has arrived: a client that sends none keeps no slot from others. The event
    loop's thread owns it.
    """

    def __init__(self, limit: int, queue_length: int, timeout: float) -> None:
        """`timeout`: seconds that a request waits before it is refused."""
        self.limit = limit
        self.queue_length = queue_length
        self.timeout = timeout
        self.waiting = 0
        """Requests that wait for a slot."""
        self._slots = anyio.Semaphore(limit, fast_acquire=True)

    def check_queue(self) -> None:
        """Raises RequestRefused (429) if a request can neither have a slot nor wait for one."""
        if not self._slots.value and self.waiting >= self.queue_length:
            raise self._full(f"{self.queue_length} more wait, which is the limit")

    @owned
    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """One request's slot, for the time of the `with` block. Raises RequestRefused (429) if the queue is full, or no
        slot became free in time."""
        self.check_queue()
        self.waiting += 1
        try:
            with anyio.move_on_after(self.timeout) as wait:
                await self._slots.acquire()
        finally:
            self.waiting -= 1
        if wait.cancelled_caught:
            raise self._full(f"{self.waiting} more wait, and this one has waited {self.timeout:g} s")
        try:
            yield
        finally:
            self._slots.release()

    def _full(self, queue: str) -> RequestRefused:
        return RequestRefused(
            HTTPStatus.TOO_MANY_REQUESTS, f"the proxy serves {self.limit} requests, {queue}: retry later"
        )
