# SPDX-License-Identifier: Apache-2.0
"""How many requests an engine has at a time, and who waits for a place there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import anyio

from vllm_ascend_pd.proxy.routing.registry import Engine


class Full(Exception):
    """There was no place in the line, or none at an engine in time. Its text says which bound that was."""


class Party:
    """The prefills of one client's request. In a line they have one place together, and take turns with those of
    others."""

    def __init__(self) -> None:
        self.places = 0
        """Those that they have had at engines."""

    @property
    def seated(self) -> bool:
        return self.places > 0


class Seats:
    """At most `limit` requests at each engine of a role (None: any number). Those for which no engine has a place wait
    in one line, in which there are `line` places for each engine that they could go to, for `patience` seconds."""

    def __init__(self, limit: int | None, line: int, patience: float) -> None:
        self.limit = limit
        self._length = line
        self._patience = patience
        self._taken: Counter[Engine] = Counter()
        self._returning: dict[_Waiting, None] = {}
        """Those who had a place before. They come first."""
        self._line: dict[Party, dict[_Waiting, None]] = {}
        """Whose turn is next comes first."""

    @property
    def waiting(self) -> int:
        return sum(1 for _ in self._everyone())

    def taken(self, engine: Engine) -> int:
        return self._taken[engine]

    @contextmanager
    def held(self, engine: Engine) -> Iterator[None]:
        """For who was given `engine` by `take`: gives the place to the next in line."""
        try:
            yield
        finally:
            self._leave(engine)

    async def take(
        self,
        engines: Sequence[Engine],
        admitted: bool = False,
        avoid: Collection[str] = (),
        party: Party | None = None,
        waited: float = 0.0,
    ) -> Engine | None:
        """A place at the first of some engines that has one, or gets one; also at one that joins meanwhile, unless it
        is in `avoid`. None: none of all these may get requests any more. Raises Full.

        `admitted`: the request had a place before, so it comes before the line, be that full or not. `party`: whom it
        came with; None: nobody. A party as a whole is refused, or served: once one of it has had a place, the others
        do not count in the line, and wait for any time. `waited`: for how many seconds it has, at engines that are
        gone."""
        party = party or Party()
        for engine in engines:
            if engine.open and self._is_free(engine):
                self._seat(party, engine)
                return engine
        waiting = _Waiting(engines, avoid, party)
        if not waiting.has_hope:
            return None
        if not (admitted or self._may_wait(party, len(engines))):
            raise Full(f"{self._length * len(engines)} requests wait for one already (--queue-per-engine)")
        line = self._returning if admitted else self._line.setdefault(party, {})
        line[waiting] = None
        try:
            with anyio.move_on_after(self._patience - waited):
                await waiting.over()
            if waiting.engine is None and party.seated:
                await waiting.over()
        except BaseException:
            if waiting.engine is not None:
                party.places -= 1
                self._leave(waiting.engine)
            raise
        finally:
            line.pop(waiting)
            if not (line or admitted):
                del self._line[party]
        if waiting.engine is None and waiting.has_hope:
            raise Full(f"none had a place within {self._patience:g} s (--queue-timeout)")
        return waiting.engine

    def _may_wait(self, party: Party, engines: int) -> bool:
        if party.seated or party in self._line:
            return True
        return sum(not other.seated for other in self._line) < self._length * engines

    def _is_free(self, engine: Engine) -> bool:
        return self.limit is None or self._taken[engine] < self.limit

    def _seat(self, party: Party, engine: Engine) -> None:
        self._taken[engine] += 1
        party.places += 1

    def _leave(self, engine: Engine) -> None:
        self._taken[engine] -= 1
        if not self._taken[engine]:
            del self._taken[engine]  # it may be gone
        self.call(engine)

    def join(self, engine: Engine) -> None:
        """An engine gets requests now that did not: those that wait already may go there, too."""
        for waiting in self._everyone():
            if engine.url not in waiting.avoid:
                waiting.engines.add(engine)
        self.call(engine)

    def closed(self, engine: Engine) -> None:
        """An engine gets no requests any more: who waits for no other one need not go on, and who was given a place
        there just now, and is not on the way yet, waits on."""
        others: set[Engine] = set()
        for waiting in self._everyone():
            if waiting.engine is engine:
                waiting.engine = None
                waiting.party.places -= 1
                self._leave(engine)
                others |= waiting.engines
            if engine in waiting.engines:
                waiting.called.set()
        for other in others:  # which nobody was called to meanwhile
            self.call(other)

    def call(self, engine: Engine) -> None:
        """Gives the free places of an engine to those who wait for one."""
        while engine.open and self._is_free(engine) and (waiting := self._next(engine)) is not None:
            self._seat(waiting.party, engine)
            waiting.engine = engine
            waiting.called.set()

    def _next(self, engine: Engine) -> _Waiting | None:
        """Whose turn it is, of those who may go to an engine. The next turn is another party's."""
        for waiting in self._everyone():
            if waiting.engine is None and engine in waiting.engines:
                if waiting.party in self._line:
                    self._line[waiting.party] = self._line.pop(waiting.party)
                return waiting
        return None

    def _everyone(self) -> Iterator[_Waiting]:
        yield from self._returning
        for party in self._line.values():
            yield from party


class _Waiting:
    """One in line, and the engine it was given."""

    def __init__(self, engines: Sequence[Engine], avoid: Collection[str], party: Party) -> None:
        self.engines = set(engines)
        self.avoid = avoid
        self.party = party
        self.engine: Engine | None = None
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
