# SPDX-License-Identifier: Apache-2.0
"""The queue: how many requests an engine, or the proxy itself, takes at a time, and who waits for a slot. No I/O.

There is one for the requests that the proxy serves, and one for the engines of each role. `Queue.assign` gives free
slots to those that wait. It may be called at any time: it changes nothing where there is nothing to give.

Some requests give way: they may keep their slots until others have ended, which therefore must not wait for them. Their
slots do not count for the others, and they get at most half of the slots of all engines together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import anyio

from vllm_ascend_pd.core.threads import owned

_FIRST_PAUSE_SECONDS = 0.1
"""After so many seconds a busy engine is tried with more requests. The time doubles while it stays busy."""
_LONGEST_PAUSE_SECONDS = 5.0


class NoFreeSlotError(Exception):
    """The queue is full, or no slot became free in time. The message names the limit."""

    def __init__(self, why: str, timed_out: bool) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class HasSlots:
    """Takes a limited number of requests at a time: an engine, or the proxy itself. Only its `Queue` changes it."""

    def __init__(self) -> None:
        self.slots_used = 0
        self.giving_way = 0
        """Slots of those requests that give way."""
        self.busy: _Busy | None = None
        """What is known of its own limit. None: it has not been busy lately."""

    @property
    def takes_requests(self) -> bool:
        """Whether it may get requests."""
        return True


class _Busy:
    """How many requests a busy engine takes, by its own answers."""

    def __init__(self) -> None:
        self.limit = 0
        """Requests of this proxy."""
        self.is_full = False
        """Whether it was busy since `limit` was last raised."""
        self.pause = _FIRST_PAUSE_SECONDS
        """Seconds until `limit` is raised."""
        self.timer: asyncio.TimerHandle | None = None


class Group(Protocol):
    """Requests that count as one in the queue, and take turns with other groups."""

    slots_given: int
    """Slots that its members have been given so far. Only the queue changes it."""


T = TypeVar("T", bound=HasSlots)


class _Waiter(Generic[T]):
    """One waiting request."""

    def __init__(
        self, choices: Sequence[T], avoid: Collection[str], group: Group | None, gives_way: bool = False
    ) -> None:
        self.choices = dict.fromkeys(choices)
        """Where it may get a slot, in order of preference."""
        self.avoid = avoid
        """URLs of engines that it must not use, should they become available."""
        self.gives_way = gives_way
        self.slots_given = 0
        self.group: Group = group or self
        self.given: T | None = None
        """Where it was given a slot."""
        self.changed = anyio.Event()
        """Set when `given` is, or when no choice is left. Replaced at each wait."""

    async def wait(self) -> None:
        """Returns when it was given a slot, or has nothing left to wait for."""
        while self.given is None and self.choices:
            self.changed = anyio.Event()
            await self.changed.wait()


class Queue(Generic[T]):
    """Gives slots to requests, and queues those for which none is free. The event loop's thread owns it."""

    def __init__(self, limit: int | None, length: int, timeout: float, in_all: int | None = None) -> None:
        """
        Args:
            limit: slots of each engine; None: no limit. Others get as many beside those of requests that give way.
            length: how many groups may wait, for each engine that they could use.
            timeout: seconds that a group waits before it is refused.
            in_all: slots of all engines together; None: no limit.
        """
        self.limit = limit
        self.length = length
        self.timeout = timeout
        self._in_all = in_all
        self.waiting = 0
        """Requests that wait for a slot."""
        self._total = 0
        """Slots in use everywhere."""
        self._giving_way = 0
        """Those of requests that give way."""
        self._readmitted: dict[_Waiter[T], None] = {}
        """Requests that had a slot before, in order. They are served before the others."""
        self._groups: dict[Group, dict[_Waiter[T], None]] = {}
        """The other groups in the order of their turns, each with its waiting members in order."""
        self._begun: set[Group] = set()
        """Those of them that have been given a slot. They count in no limit."""
        self._wanted: Counter[tuple[T, bool]] = Counter()
        """How many requests wait for each engine, by whether they give way. There are no entries of 0."""

    def check(self, choices: Sequence[T], gives_way: bool = False) -> None:
        """Raises NoFreeSlotError if a new request can neither have a slot at one of `choices` nor wait for one."""
        is_full = len(self._groups) - len(self._begun) >= self.length * len(choices)
        if is_full and not any(self._is_free(each, gives_way) for each in choices):
            raise NoFreeSlotError(f"{self.length * len(choices)} requests already wait", timed_out=False)

    @owned
    async def acquire(
        self,
        choices: Sequence[T],
        *,
        readmitted: bool = False,
        avoid: Collection[str] = (),
        group: Group | None = None,
        waited: float = 0.0,
        gives_way: bool = False,
    ) -> T | None:
        """Takes a slot at one of `choices`, and waits for one if none is free. Give it back by `release`.

        Engines that become available while the request waits are used, too.

        Args:
            choices: in order of preference.
            readmitted: whether the request had a slot before. It then waits before the others, and in a full queue.
            avoid: URLs of engines not to use, should they become available meanwhile.
            group: what the request belongs to; None: it is a group of its own. A group is refused as a whole or not at
                all: once a member has had a slot, the others count in no limit and wait without a timeout.
            waited: seconds that the request has waited already, for engines that are gone.
            gives_way: whether the request keeps none waiting that does not give way.

        Returns:
            Where the slot is. None: ask again for others, because these, or the one whose slot this request was given,
            may get no more requests.

        Raises:
            NoFreeSlotError: the queue is full, or the timeout has passed.
        """
        for each in choices:
            if self._is_free(each, gives_way):
                self._take(each, group, gives_way)
                return each
        waiter = _Waiter([each for each in choices if each.takes_requests], avoid, group, gives_way)
        if not waiter.choices:
            return None
        if not (readmitted or waiter.group.slots_given or waiter.group in self._groups):
            self.check(choices, gives_way)
        self._enter(waiter, readmitted)
        try:
            with anyio.move_on_after(self.timeout - waited):
                await waiter.wait()
            if waiter.given is None and waiter.group.slots_given:
                await waiter.wait()
        except BaseException:
            self._give_back(waiter)
            raise
        finally:
            self._leave(waiter)
        if waiter.given is not None and not waiter.given.takes_requests:  # it closed in the same turn of the event loop
            self._give_back(waiter)
            return None
        if waiter.given is None and waiter.choices:
            raise NoFreeSlotError(f"no slot became free within {self.timeout:g} s (--queue-timeout)", timed_out=True)
        return waiter.given

    @owned
    def release(self, engine: T, gives_way: bool = False) -> None:
        """Gives back a slot from `acquire`. `gives_way`: as there."""
        self._total -= 1
        engine.slots_used -= 1
        if gives_way:
            self._giving_way -= 1
            engine.giving_way -= 1
        self.assign()

    @owned
    def assign(self) -> None:
        """Gives free slots to the requests whose turn it is, and ends the waits for engines that are gone."""
        for gone in dict.fromkeys(engine for engine, _ in self._wanted if not engine.takes_requests):
            for waiter in self._in_order():
                if gone in waiter.choices:
                    self._drop(waiter, gone)
        while free := {wanted for wanted in self._wanted if self._is_free(*wanted)}:
            waiter, engine = next(
                (waiter, engine)
                for waiter in self._in_order()
                for engine in waiter.choices
                if (engine, waiter.gives_way) in free
            )
            self._leave(waiter)
            if waiter.group in self._groups:  # its other members wait until all other groups have had a turn
                self._groups[waiter.group] = self._groups.pop(waiter.group)
            self._take(engine, waiter.group, waiter.gives_way)
            waiter.given = engine
            waiter.changed.set()

    @owned
    def opened(self, engine: T, url: str) -> None:
        """Lets waiting requests use an engine that may get requests from now on."""
        if self._wanted[engine, False] + self._wanted[engine, True] == self.waiting:
            return  # they all may
        for waiter in self._in_order():
            if url not in waiter.avoid and engine not in waiter.choices:
                waiter.choices[engine] = None
                self._wanted[engine, waiter.gives_way] += 1
        self.assign()

    @owned
    def put_last(self, engine: T, before: Collection[T]) -> None:
        """Keeps an engine from waiting requests that may use one of `before`."""
        if self._wanted[engine, False] + self._wanted[engine, True]:
            for waiter in self._in_order():
                if engine in waiter.choices and any(each in waiter.choices for each in before):
                    self._drop(waiter, engine)

    @owned
    def closed(self, engine: T) -> None:
        """Forgets what is known of an engine that gets no more requests, and ends the waits for it."""
        if engine.busy is not None and engine.busy.timer is not None:
            engine.busy.timer.cancel()
        engine.busy = None
        self.assign()

    @owned
    def note_busy(self, engine: T, group: Group | None = None) -> None:
        """An engine has answered a request, which still holds its slot, that it is busy.

        The others that it has are as many as it takes. Further ones wait until one of these ends, or until a growing
        pause is over. `group`: the request's; its slot does not count as one that it has had.
        """
        if group is not None:
            self._take_back(group)
        if engine.takes_requests:
            busy = engine.busy = engine.busy or _Busy()
            busy.limit, busy.is_full = engine.slots_used - 1, True
            if busy.timer is None:
                busy.timer = asyncio.get_running_loop().call_later(busy.pause, self._widen, engine)

    def _widen(self, engine: T) -> None:
        """Tries an engine that was busy with more requests, until there are no more."""
        busy = engine.busy
        assert busy is not None
        if not busy.is_full and engine.slots_used < busy.limit:
            engine.busy = None
        else:
            busy.pause = min(2 * busy.pause, _LONGEST_PAUSE_SECONDS) if busy.is_full else _FIRST_PAUSE_SECONDS
            busy.limit += max(1, busy.limit // 2)
            busy.is_full = False
            busy.timer = asyncio.get_running_loop().call_later(busy.pause, self._widen, engine)
        self.assign()

    def _is_free(self, engine: T, gives_way: bool) -> bool:
        """Whether an engine may get a request and has a slot for it."""
        if not engine.takes_requests or self._total == self._in_all:
            return False
        used, busy = engine.slots_used, engine.busy
        if busy is not None and used >= busy.limit:
            return False
        if gives_way and self._in_all is not None and 2 * self._giving_way >= self._in_all:
            return False
        return self.limit is None or (used if gives_way else used - engine.giving_way) < self.limit

    def _take(self, engine: T, group: Group | None, gives_way: bool) -> None:
        engine.slots_used += 1
        self._total += 1
        if gives_way:
            engine.giving_way += 1
            self._giving_way += 1
        if group is not None:
            group.slots_given += 1
            if group in self._groups:
                self._begun.add(group)

    def _take_back(self, group: Group) -> None:
        """A slot that the group was given does not count."""
        group.slots_given -= 1
        if not group.slots_given:
            self._begun.discard(group)

    def _give_back(self, waiter: _Waiter[T]) -> None:
        """Gives back a slot that a request was given and does not use."""
        if waiter.given is not None:
            self._take_back(waiter.group)
            self.release(waiter.given, waiter.gives_way)

    def _enter(self, waiter: _Waiter[T], readmitted: bool) -> None:
        if readmitted:
            self._readmitted[waiter] = None
        else:
            self._groups.setdefault(waiter.group, {})[waiter] = None
            if waiter.group.slots_given:
                self._begun.add(waiter.group)
        self.waiting += 1
        self._wanted.update((engine, waiter.gives_way) for engine in waiter.choices)

    def _leave(self, waiter: _Waiter[T]) -> None:
        """Takes a request out of the queue, if it is still there."""
        members = self._groups.get(waiter.group, {})
        if waiter in self._readmitted:
            del self._readmitted[waiter]
        elif waiter in members:
            del members[waiter]
            if not members:
                del self._groups[waiter.group]
                self._begun.discard(waiter.group)
        else:
            return
        self.waiting -= 1
        for engine in waiter.choices:
            self._want_less(engine, waiter.gives_way)

    def _drop(self, waiter: _Waiter[T], engine: T) -> None:
        """A waiting request may no longer use an engine."""
        del waiter.choices[engine]
        self._want_less(engine, waiter.gives_way)
        if not waiter.choices:
            waiter.changed.set()

    def _want_less(self, engine: T, gives_way: bool) -> None:
        self._wanted[engine, gives_way] -= 1
        if not self._wanted[engine, gives_way]:
            del self._wanted[engine, gives_way]

    def _in_order(self) -> Iterator[_Waiter[T]]:
        """All waiting requests, in the order in which they get slots."""
        yield from self._readmitted
        for members in self._groups.values():
            yield from members
