# SPDX-License-Identifier: Apache-2.0
"""The engines of one role as they are now: they come, drain and go while requests are in flight. No I/O.

An engine that is removed gets nothing new; what it is answering goes on, since that needs no entry here.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from vllm_ascend_pd.proxy.routing.load import InFlightLoad, LoadReport, LoadSnapshot

MAX_ENGINES = 512
"""Of a role. Each one is polled, and costs a connection for that."""

# Then one more failure is enough for as long again.
_PASSED_OVER_SECONDS = 10.0


class EngineRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class HealthGate:
    """Ejects an engine after `eject_after` failed checks in a row, and lets it in after `return_after` good ones."""

    def __init__(self, eject_after: int, return_after: int, proven: bool = True) -> None:
        """`proven`: no good check is needed at first."""
        self.proven = proven
        """Whether any check was good, or none was needed."""
        self.ejected = False
        self.known = False
        """Whether any check has ended."""
        self.reason = ""
        """Of the last failed check."""
        self._limits = {False: eject_after, True: return_after}
        self._against = 0

    def checked(self, reason: str | None, at_once: bool = False) -> bool:
        """Counts a check: `reason` is None for a good one. Returns whether that ejected the engine or let it in.

        `at_once`: a single check is enough, because the engine itself says that it is broken."""
        self.known = True
        if reason is None:
            self.proven = True
        else:
            self.reason = reason
        if (reason is None) is not self.ejected:
            self._against = 0
            return False
        self._against += 1
        if self._against < self._limits[self.ejected] and not at_once:
            return False
        self.ejected, self._against = not self.ejected, 0
        return True

    @property
    def shut(self) -> bool:
        """Whether the engine gets requests only if no other is left."""
        return self.ejected or not self.proven

    @property
    def failing(self) -> bool:
        """Whether the last check failed, and the engine is not ejected, or not yet."""
        return not self.ejected and self._against > 0


class FailureStreak:
    """Of requests, which can fail at an engine whose checks are all well. Such an engine has nothing to do, so it would
    get the next request, too: it is passed over for a while."""

    def __init__(self, patience: int) -> None:
        """`patience`: failures in a row."""
        self._patience = patience
        self._failures = 0
        self._until = float("-inf")

    def ended(self, well: bool, now: float) -> None:
        self._failures = 0 if well else self._failures + 1
        self._until = now + _PASSED_OVER_SECONDS if self._failures >= self._patience else float("-inf")

    def bad(self, now: float) -> bool:
        return now < self._until


class RegisteredEngine:
    """One engine, and what the proxy knows of it."""

    def __init__(self, role: EngineRole, url: str, gate: HealthGate, record: FailureStreak) -> None:
        self.role = role
        self.url = url
        self.id = f"{role.value}-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"
        """The same in each proxy and after each start."""
        self.gate = gate
        self._record = record
        self.draining = False
        self.removed = False
        self.sources: set[str] = set()
        """Who says that it exists."""
        self.sent = InFlightLoad()
        """In flight."""
        self.worked_at = float("-inf")
        """When it last showed that it works: it served a request, or its count of tokens had grown. Seconds of the
        clock of `served` and `note`."""
        self._seen: LoadReport | None = None
        self._same_tokens_since = float("-inf")
        """When the engine first said that it had computed as many tokens as it said last."""

    @property
    def open(self) -> bool:
        """Whether it may get requests."""
        return not (self.draining or self.removed)

    def doubtful(self, now: float) -> bool:
        """Whether others should be asked first."""
        return self.gate.shut or self.passed_over(now)

    def passed_over(self, now: float) -> bool:
        """Whether so many requests have failed there that others are asked first."""
        return self._record.bad(now)

    def served(self, well: bool, now: float) -> None:
        """A request ended, and it says something about the engine."""
        self._record.ended(well, now)
        if well:
            self.worked_at = now

    @contextmanager
    def serving(self, sent: InFlightLoad) -> Iterator[None]:
        self._add(sent.requests, sent.tokens)
        try:
            yield
        finally:
            self._add(-sent.requests, -sent.tokens)

    def _add(self, requests: int, tokens: int) -> None:
        self.sent = InFlightLoad(self.sent.requests + requests, self.sent.tokens + tokens)

    def note(self, snapshot: LoadSnapshot, sent: InFlightLoad, now: float) -> None:
        """`sent`: what was in flight when the engine was asked for the snapshot; `now`: seconds of any steady clock."""
        if self._seen is None or snapshot.tokens is None or snapshot.tokens != self._seen.snapshot.tokens:
            self._same_tokens_since = now
            if self._seen is not None and snapshot.tokens is not None:
                self.worked_at = now
        self._seen = LoadReport(snapshot, sent, now)

    @property
    def broken(self) -> str | None:
        """Why the engine must be restarted, by its own metrics when last read; None if they say nothing of the kind."""
        ranks = 0 if self._seen is None else self._seen.snapshot.broken_ranks or 0
        return f"it must be restarted: KV exchange has failed for good on {ranks} rank(s)" if ranks else None

    def computed_nothing(self, since: float) -> float:
        """For how many seconds after `since` the engine is known to have computed no token, as of its last snapshot."""
        return 0.0 if self._seen is None else self._seen.at - max(since, self._same_tokens_since)

    def seen(self, now: float, fresh_for: float) -> LoadReport | None:
        """The last snapshot, unless it is older than `fresh_for` seconds."""
        return self._seen if self._seen is not None and now - self._seen.at <= fresh_for else None


class TooManyEnginesError(Exception):
    """There are `MAX_ENGINES` already."""


class EngineRegistry:
    """Of one role, in the order they came; a URL is an engine."""

    def __init__(self, role: EngineRole, *, eject_after: int = 3, return_after: int = 2) -> None:
        self.role = role
        self.on_gone: Callable[[str], None] = lambda url: None
        """Called with the URL of an engine that is removed, or was ejected: what it had cached may be gone."""
        self.on_open: Callable[[RegisteredEngine], None] = lambda engine: None
        """Called with an engine that gets requests now, and did not."""
        self.on_closed: Callable[[RegisteredEngine], None] = lambda engine: None
        """Called with an engine that gets none any more: it is removed, or drains."""
        self.on_trial = False
        """Whether engines that come now are asked last until a check is good: those that are there when the proxy
        starts may be asked at once."""
        self._eject_after = eject_after
        self._return_after = return_after
        self._engines: dict[str, RegisteredEngine] = {}

    def __iter__(self) -> Iterator[RegisteredEngine]:
        return iter(tuple(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, url: str) -> RegisteredEngine | None:
        return self._engines.get(url)

    def by_id(self, engine_id: str) -> RegisteredEngine | None:
        return next((engine for engine in self if engine.id == engine_id), None)

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the engines that may get requests, ejected ones among them."""
        return tuple(engine.url for engine in self if engine.open)

    def add(self, url: str, source: str) -> RegisteredEngine:
        """Names one more source for an engine that is there already. Raises TooManyEnginesError."""
        engine = self._engines.get(url)
        if engine is None:
            if len(self._engines) >= MAX_ENGINES:
                raise TooManyEnginesError(f"there are {MAX_ENGINES} {self.role.value} engines already")
            engine = self._engines[url] = self._new(url)
        engine.sources.add(source)
        return engine

    def _new(self, url: str) -> RegisteredEngine:
        gate = HealthGate(self._eject_after, self._return_after, proven=not self.on_trial)
        return RegisteredEngine(self.role, url, gate, FailureStreak(self._eject_after))

    def remove(self, engine: RegisteredEngine) -> None:
        if self._engines.get(engine.url) is engine:
            del self._engines[engine.url]
            engine.removed = True
            self.on_gone(engine.url)
            self.on_closed(engine)

    def drain(self, engine: RegisteredEngine) -> None:
        """It gets nothing new, and keeps what it has."""
        engine.draining = True
        self.on_closed(engine)

    def undrain(self, engine: RegisteredEngine) -> None:
        engine.draining = False
        if not engine.gate.shut:
            self.on_open(engine)

    def checked(self, engine: RegisteredEngine, reason: str | None, at_once: bool = False) -> bool:
        """As `HealthGate.checked`."""
        was_shut = engine.gate.shut
        changed = engine.gate.checked(reason, at_once)
        if changed and not engine.removed:
            self.on_gone(engine.url)
        if was_shut and not engine.gate.shut:
            self.on_open(engine)
        return changed

    def replace(self, source: str, urls: Collection[str]) -> tuple[list[str], list[str]]:
        """Makes `urls` the engines that `source` lists. Returns those added, and those removed because no source lists
        them any more. Raises TooManyEnginesError if some could not be added."""
        gone = []
        for engine in self:
            if source in engine.sources and engine.url not in urls:
                engine.sources.discard(source)
                if not engine.sources:
                    self.remove(engine)
                    gone.append(engine.url)
        came = [url for url in urls if url not in self._engines]
        for url in urls:
            self.add(url, source)
        return came, gone
