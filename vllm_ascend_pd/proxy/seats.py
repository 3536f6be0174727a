# SPDX-License-Identifier: Apache-2.0
"""How many requests an engine has at a time, and who waits for a place there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import anyio

from .registry import Engine


class Seats:
    """At most `limit` requests at each engine of a role (None: any number). Those for which no engine has a place wait
    in one line, in which there are `line` places for each engine that they could go to, for `patience` seconds."""

    def __init__(self, limit: int | None, line: int, patience: float) -> None:
        self.limit = limit
        self._line = line
        self._patience = patience
        self._taken: Counter[Engine] = Counter()
        self._returning: dict[_Waiting, None] = {}
        """Those who had a place before. They come first."""
        self._waiting: dict[_Waiting, None] = {}

    @property
    def waiting(self) -> int:
        return len(self._returning) + len(self._waiting)

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
        self, engines: Sequence[Engine], admitted: bool = False, avoid: Collection[str] = ()
    ) -> Engine | None:
        """A place at the first of some engines that has one, or gets one, or at one that joins meanwhile, but those in
        `avoid`. None: the line is full, it took too long, or none of these engines may get requests any more.
        `admitted`: the request had one before, so it is called before the line, be that full or not."""
        for engine in engines:
            if engine.open and self._is_free(engine):
                self._taken[engine] += 1
                return engine
        if not engines or (not admitted and len(self._waiting) >= self._line * len(engines)):
            return None
        waiting = _Waiting(engines, avoid)
        line = self._returning if admitted else self._waiting
        line[waiting] = None
        try:
            with anyio.move_on_after(self._patience):
                await waiting.called.wait()
        except BaseException:
            if waiting.engine is not None:
                self._leave(waiting.engine)
            raise
        finally:
            line.pop(waiting)
        return waiting.engine

    def _is_free(self, engine: Engine) -> bool:
        return self.limit is None or self._taken[engine] < self.limit

    def _leave(self, engine: Engine) -> None:
        self._taken[engine] -= 1
        if not self._taken[engine]:
            del self._taken[engine]  # it may be gone
        self.call(engine)

    def join(self, engine: Engine) -> None:
        """An engine gets requests now that did not: those that wait already may go there, too."""
        for waiting in chain(self._returning, self._waiting):
            if engine.url not in waiting.avoid:
                waiting.engines.add(engine)
        self.call(engine)

    def call(self, engine: Engine) -> None:
        """Gives the free places of an engine to those who wait for one."""
        for waiting in chain(self._returning, self._waiting):
            if not (engine.open and self._is_free(engine)):
                return
            if waiting.engine is None and engine in waiting.engines:
                self._taken[engine] += 1
                waiting.engine = engine
                waiting.called.set()


class _Waiting:
    """One in line, and the engine it was given."""

    def __init__(self, engines: Sequence[Engine], avoid: Collection[str]) -> None:
        self.engines = set(engines)
        self.avoid = avoid
        self.engine: Engine | None = None
        self.called = anyio.Event()
