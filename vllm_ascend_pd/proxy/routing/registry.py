# SPDX-License-Identifier: Apache-2.0
"""The engines of one role that exist now. Engines are added, drained and removed while requests are in flight. No I/O.

A removed engine gets no new requests. Requests that it already has continue: they need no entry here.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.routing.health_gate import FailureStreak, HealthGate
from vllm_ascend_pd.proxy.routing.load import InFlightLoad, LoadReport, LoadSnapshot
from vllm_ascend_pd.proxy.routing.prompt_tally import PromptTally

MAX_ENGINES = 512
"""Engines per role. Each one is polled, which takes a connection."""


class EngineRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class RegisteredEngine:
    """One engine, and what the proxy knows about it."""

    def __init__(self, role: EngineRole, url: str, gate: HealthGate, streak: FailureStreak) -> None:
        self.role = role
        self.url = url
        self.id = f"{role.value}-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"
        """The same in every proxy and after every start."""
        self.gate = gate
        """State of its health checks and refusals. Only the registry changes it."""
        self._streak = streak
        self.draining = False
        """Whether an operator drains it. Only the registry changes it."""
        self.removed = False
        """Whether it has been removed. Only the registry changes it."""
        self.sources: set[str] = set()
        """What lists it: the command line, a file, a DNS name, the admin API. Only the registry changes it."""
        self.sent = InFlightLoad()
        """What this proxy has in flight there. Only `serving` changes it."""
        self.worked_at = float("-inf")
        """When it last served a request, or its token count last grew. On the clock of `served` and `note`."""
        self._report: LoadReport | None = None
        """The last load report."""
        self._same_tokens_since = float("-inf")
        """When the engine first reported the token count of its last report."""

    @property
    def open(self) -> bool:
        """Whether it may get requests."""
        return not (self.draining or self.removed)

    def doubtful(self, now: float) -> bool:
        """Whether healthy engines should be asked first."""
        return (self.gate.shut and not self.gate.trial_due(now)) or self.passed_over(now)

    def passed_over(self, now: float) -> bool:
        """Whether other engines are asked first because many requests in a row failed here."""
        return self._streak.avoided(now)

    def served(self, well: bool, now: float) -> None:
        """Records the end of a request. Failures that are not the engine's fault are not recorded."""
        self._streak.ended(well, now)
        if well:
            self.worked_at = now

    @contextmanager
    def serving(self, sent: InFlightLoad) -> Iterator[None]:
        """Counts a request as in flight for the time of the `with` block."""
        self._add(sent.requests, sent.tokens)
        try:
            yield
        finally:
            self._add(-sent.requests, -sent.tokens)

    def _add(self, requests: int, tokens: int) -> None:
        self.sent = InFlightLoad(self.sent.requests + requests, self.sent.tokens + tokens)

    def note(self, snapshot: LoadSnapshot, sent: InFlightLoad, now: float) -> None:
        """Records what the engine reports of its load.

        `sent`: what this proxy had in flight there when it asked. `now`: seconds of a steady clock.
        """
        if self._report is None or snapshot.tokens is None or snapshot.tokens != self._report.snapshot.tokens:
            self._same_tokens_since = now
            if self._report is not None and snapshot.tokens is not None:
                self.worked_at = now
        self._report = LoadReport(snapshot, sent, now)

    @property
    def last_snapshot(self) -> LoadSnapshot | None:
        """What the engine reported last, however long ago."""
        return None if self._report is None else self._report.snapshot

    @property
    def broken(self) -> str | None:
        """Why the engine must be restarted, by its last metrics. None: they report no such thing."""
        ranks = 0 if self._report is None else self._report.snapshot.broken_ranks or 0
        return f"it must be restarted: KV exchange has failed for good on {ranks} rank(s)" if ranks else None

    def computed_nothing(self, since: float) -> float:
        """Seconds after `since` in which the engine computed no token, by its own metrics; 0 if it has sent none."""
        return 0.0 if self._report is None else self._report.at - max(since, self._same_tokens_since)

    def idle(self, since: float, now: float) -> float:
        """Seconds after `since` in which the engine served no request and its metrics show no other work."""
        return now - max(since, self.worked_at)

    def report(self, now: float, fresh_for: float) -> LoadReport | None:
        """The last load report, unless it is older than `fresh_for` seconds."""
        return self._report if self._report is not None and now - self._report.at <= fresh_for else None


class TooManyEnginesError(Exception):
    """There are `MAX_ENGINES` engines of the role already."""


class SlotListener(Protocol):
    """Is called when an engine starts or stops taking requests. `ConcurrencyLimiter` implements it."""

    def engine_opened(self, engine: RegisteredEngine) -> None:
        """An engine may get requests now and could not before."""

    def engine_closed(self, engine: RegisteredEngine) -> None:
        """An engine was removed or drains: it gets no more requests."""


class CacheListener(Protocol):
    """Is called when an engine's prefix cache may be lost. Routing strategies implement it."""

    def forget(self, url: str) -> None:
        """An engine was removed or ejected, so it may have been restarted."""


class _NoListener:
    def engine_opened(self, engine: RegisteredEngine) -> None:
        pass

    def engine_closed(self, engine: RegisteredEngine) -> None:
        pass

    def forget(self, url: str) -> None:
        pass


_NO_LISTENER = _NoListener()


class EngineRegistry:
    """The engines of one role, in the order in which they were added. There is one engine per URL.

    The event loop's thread owns it. Engines of the command line are added before the loop runs.
    """

    def __init__(
        self,
        role: EngineRole,
        *,
        eject_after: int = 3,
        return_after: int = 2,
        slots: SlotListener = _NO_LISTENER,
        caches: CacheListener = _NO_LISTENER,
    ) -> None:
        """`eject_after` and `return_after`: as in HealthGate. `eject_after` also limits failed requests in a row."""
        self.role = role
        self.prompts = PromptTally()
        """Who computed prompts, by the engines' reports. Only `note` changes it."""
        self._eject_after = eject_after
        self._return_after = return_after
        self._slots = slots
        self._caches = caches
        self._new_need_check = False
        """Whether engines added from now on are asked last until a check is good."""
        self._engines: dict[str, RegisteredEngine] = {}
        """By URL."""

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
        """URLs of the engines that may get requests, ejected ones included."""
        return tuple(engine.url for engine in self if engine.open)

    def require_checks(self) -> None:
        """Engines added from now on are asked last until a health check is good. Those listed when the proxy starts
        may be asked at once."""
        self._new_need_check = True

    def add(self, url: str, source: str) -> RegisteredEngine:
        """Adds an engine, or one more source to an engine that exists. Raises TooManyEnginesError."""
        engine = self._engines.get(url)
        if engine is None:
            if len(self._engines) >= MAX_ENGINES:
                raise TooManyEnginesError(f"there are {MAX_ENGINES} {self.role.value} engines already")
            engine = self._engines[url] = self._new(url)
        engine.sources.add(source)
        return engine

    def _new(self, url: str) -> RegisteredEngine:
        gate = HealthGate(self._eject_after, self._return_after, proven=not self._new_need_check)
        return RegisteredEngine(self.role, url, gate, FailureStreak(self._eject_after))

    def remove(self, engine: RegisteredEngine) -> None:
        if self._engines.get(engine.url) is engine:
            del self._engines[engine.url]
            engine.removed = True
            self._caches.forget(engine.url)
            self._slots.engine_closed(engine)

    @owned
    def drain(self, engine: RegisteredEngine) -> None:
        """Stops new requests to an engine. It finishes those that it has."""
        engine.draining = True
        self._slots.engine_closed(engine)

    @owned
    def undrain(self, engine: RegisteredEngine) -> None:
        engine.draining = False
        if not engine.gate.shut:
            self._slots.engine_opened(engine)

    @owned
    def checked(self, engine: RegisteredEngine, reason: str | None, at_once: bool = False) -> bool:
        """Records a health check. Arguments and result: as for `HealthGate.checked`."""
        was_shut = engine.gate.shut
        changed = engine.gate.checked(reason, at_once)
        if changed and not engine.removed:
            self._caches.forget(engine.url)
        if was_shut and not engine.gate.shut:
            self._slots.engine_opened(engine)
        return changed

    @owned
    def refused(self, engine: RegisteredEngine, how: str, now: float) -> bool:
        """Records a refused request. Arguments and result: as for `HealthGate.refused`."""
        ejected = engine.gate.refused(how, now)
        if ejected and not engine.removed:
            self._caches.forget(engine.url)
        return ejected

    @owned
    def took(self, engine: RegisteredEngine) -> bool:
        """Records a request that was taken. Result: as for `HealthGate.took`."""
        returned = engine.gate.took()
        if returned and not engine.gate.shut:
            self._slots.engine_opened(engine)
        return returned

    @owned
    def note(self, engine: RegisteredEngine, snapshot: LoadSnapshot, sent: InFlightLoad, now: float) -> None:
        """Records what an engine reports. Arguments: as for `RegisteredEngine.note`."""
        if (last := engine.last_snapshot) is not None:  # the first report counts what was before this proxy
            self.prompts.add(last.placed, snapshot.placed)
        engine.note(snapshot, sent, now)

    def replace(self, source: str, urls: Collection[str]) -> tuple[list[str], list[str]]:
        """Makes `urls` the engines that `source` lists.

        Returns the URLs that were added, and those that were removed because no source lists them any more. Raises
        TooManyEnginesError if some could not be added.
        """
        removed = []
        for engine in self:
            if source in engine.sources and engine.url not in urls:
                engine.sources.discard(source)
                if not engine.sources:
                    self.remove(engine)
                    removed.append(engine.url)
        added = [url for url in urls if url not in self._engines]
        for url in urls:
            self.add(url, source)
        return added, removed
