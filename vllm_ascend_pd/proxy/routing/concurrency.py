# SPDX-License-Identifier: Apache-2.0
"""How many requests an engine has at a time, and who waits for a place there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import anyio

from vllm_ascend_pd.proxy.routing.registry import RegisteredEngine


class NoFreeSlotError(Exception):
    """There was no place in the line, or none at an engine in time. Its text says which bound that was."""


class RequestGroup:
    """The prefills of one client's request. In a line they have one place together, and take turns with those of
    others."""

    def __init__(self) -> None:
        self.slots = 0
        """Those that they have had at engines."""

    @property
    def started(self) -> bool:
        return self.slots > 0


class ConcurrencyLimiter:
    """At most `limit` requests at each engine of a role (None: any number). Those for which no engine has a place wait
    in one line, in which there are `line` places for each engine that they could go to, for `patience` seconds."""

    def __init__(self, limit: int | None, line: int, patience: float) -> None:
        self.limit = limit
        self._length = line
        self._patience = patience
        self._taken: Counter[RegisteredEngine] = Counter()
        self._returning: dict[_Waiting, None] = {}
        """Those who had a place before. They come first."""
        self._line: dict[RequestGroup, dict[_Waiting, None]] = {}
        """Whose turn is next comes first."""

    @property
    def waiting(self) -> int:
        return sum(1 for _ in self._everyone())

    def in_use(self, engine: RegisteredEngine) -> int:
        return self._taken[engine]

    @contextmanager
    def releasing(self, engine: RegisteredEngine) -> Iterator[None]:
        """For who was given `engine` by `take`: gives the place to the next in line."""
        try:
            yield
        finally:
            self._release(engine)

    async def acquire(
        self,
        engines: Sequence[RegisteredEngine],
        admitted: bool = False,
        avoid: Collection[str] = (),
        group: RequestGroup | None = None,
        waited: float = 0.0,
    ) -> RegisteredEngine | None:
        """A place at the first of some engines that has one, or gets one; also at one that joins meanwhile, unless it
        is in `avoid`. None: none of all these may get requests any more. Raises NoFreeSlotError.

        `admitted`: the request had a place before, so it comes before the line, be that full or not. `group`: whom it
        came with; None: nobody. A group as a whole is refused, or served: once one of it has had a place, the others
        do not count in the line, and wait for any time. `waited`: for how many seconds it has, at engines that are
        gone."""
        group = group or RequestGroup()
        for engine in engines:
            if engine.open and self._is_free(engine):
                self._occupy(group, engine)
                return engine
        waiting = _Waiting(engines, avoid, group)
        if not waiting.has_hope:
            return None
        if not (admitted or self._may_wait(group, len(engines))):
            raise NoFreeSlotError(f"{self._length * len(engines)} requests wait for one already (--queue-per-engine)")
        line = self._returning if admitted else self._line.setdefault(group, {})
        line[waiting] = None
        try:
            with anyio.move_on_after(self._patience - waited):
                await waiting.over()
            if waiting.engine is None and group.started:
                await waiting.over()
        except BaseException:
            if waiting.engine is not None:
                group.slots -= 1
                self._release(waiting.engine)
            raise
        finally:
            line.pop(waiting)
            if not (line or admitted):
                del self._line[group]
        if waiting.engine is None and waiting.has_hope:
            raise NoFreeSlotError(f"none had a place within {self._patience:g} s (--queue-timeout)")
        return waiting.engine

    def _may_wait(self, group: RequestGroup, engines: int) -> bool:
        if group.started or group in self._line:
            return True
        return sum(not other.started for other in self._line) < self._length * engines

    def _is_free(self, engine: RegisteredEngine) -> bool:
        return self.limit is None or self._taken[engine] < self.limit

    def _occupy(self, group: RequestGroup, engine: RegisteredEngine) -> None:
        self._taken[engine] += 1
        group.slots += 1

    def _release(self, engine: RegisteredEngine) -> None:
        self._taken[engine] -= 1
        if not self._taken[engine]:
            del self._taken[engine]  # it may be gone
        self.assign_slots(engine)

    def engine_opened(self, engine: RegisteredEngine) -> None:
        """An engine gets requests now that did not: those that wait already may go there, too."""
        for waiting in self._everyone():
            if engine.url not in waiting.avoid:
                waiting.engines.add(engine)
        self.assign_slots(engine)

    def engine_closed(self, engine: RegisteredEngine) -> None:
        """An engine gets no requests any more: who waits for no other one need not go on, and who was given a place
        there just now, and is not on the way yet, waits on."""
        others: set[RegisteredEngine] = set()
        for waiting in self._everyone():
            if waiting.engine is engine:
                waiting.engine = None
                waiting.group.slots -= 1
                self._release(engine)
                others |= waiting.engines
            if engine in waiting.engines:
                waiting.called.set()
        for other in others:  # which nobody was called to meanwhile
            self.assign_slots(other)

    def assign_slots(self, engine: RegisteredEngine) -> None:
        """Gives the free places of an engine to those who wait for one."""
        while engine.open and self._is_free(engine) and (waiting := self._next(engine)) is not None:
            self._occupy(waiting.group, engine)
            waiting.engine = engine
            waiting.called.set()

    def _next(self, engine: RegisteredEngine) -> _Waiting | None:
        """Whose turn it is, of those who may go to an engine. The next turn is another group's."""
        for waiting in self._everyone():
            if waiting.engine is None and engine in waiting.engines:
                if waiting.group in self._line:
                    self._line[waiting.group] = self._line.pop(waiting.group)
                return waiting
        return None

    def _everyone(self) -> Iterator[_Waiting]:
        yield from self._returning
        for group in self._line.values():
            yield from group


class _Waiting:
    """One in line, and the engine it was given."""

    def __init__(self, engines: Sequence[RegisteredEngine], avoid: Collection[str], group: RequestGroup) -> None:
        self.engines = set(engines)
        self.avoid = avoid
        self.group = group
        self.engine: RegisteredEngine | None = None
        self.called = anyio.Event()
        """Set when it is to look again."""

    @property
    def has_hope(self) -> bool:
        """Whether there is an engine to wait for."""
        return any(engine.open for engine in self.engines)

    async def over(self) -> None:
        """It was given an engine, or there is none to wait for."""
        while self.engine is None and self.has_hope:
            self.called = anyio.Event()
            await self.called.wait()
