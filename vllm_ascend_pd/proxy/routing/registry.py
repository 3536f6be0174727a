# SPDX-License-Identifier: Apache-2.0
"""The engines of one role: which there are, and in which order they are asked with a prompt. No I/O.

Engines are added, drained and removed while requests are in flight. A removed engine gets no new requests. Requests
that it already has continue: they need no entry here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.concurrency import ConcurrencyLimiter, RequestGroup
from vllm_ascend_pd.proxy.routing.engine import HealthGate, RegisteredEngine
from vllm_ascend_pd.proxy.routing.load import EngineLoad, InFlightLoad, LoadSnapshot, load_of
from vllm_ascend_pd.proxy.routing.strategies import PrefixAffinity, PromptEstimate, decode_costs, prefill_costs
from vllm_ascend_pd.proxy.settings import ProxySettings

log = logging.getLogger(__name__)

MAX_ENGINES = 512
"""Engines per role. Each one is polled, which takes a connection."""
_MEAN_OVER_PROMPTS = 32
"""The mean prompt length is an exponential average: each prompt counts 1/32."""
_FIRST_MEAN_TOKENS = 512.0
"""The mean length before the first prompt."""
_MISSED_CHECKS = 3
"""After so many failed checks, an engine's last reported load is too old."""


class TooManyEnginesError(Exception):
    """There are `MAX_ENGINES` engines of the role already."""


class EngineRanking(NamedTuple):
    """The engines to ask for one prompt, best first, and how the request waits for them."""

    prompt: PromptEstimate
    tiers: tuple[tuple[str, ...], ...]
    """URLs. An engine is asked, or waited for, only if no engine of the earlier tiers can be reached."""
    avoid: Collection[str] = ()
    """URLs of engines not to ask, should they become available while the request waits."""
    admitted: bool = False
    """Whether the request had a slot before. It then waits before requests that had none."""
    group: RequestGroup | None = None
    """The requests with which it shares a place in the queue."""

    @property
    def first(self) -> tuple[str, ...]:
        """The engines of which one gets the request, unless none of them can be reached."""
        return next((tier for tier in self.tiers if tier), ())

    def then(self, urls: Sequence[str]) -> EngineRanking:
        """This ranking with one more tier at the end."""
        return self._replace(tiers=(*self.tiers, tuple(urls)))

    def beside(self, url: str) -> EngineRanking:
        """The engines whose answer counts as much as that of `url`: without doubtful ones, unless it is one itself."""
        return self._replace(tiers=self.tiers[:1]) if self.tiers and url in self.tiers[0] else self


class SentPrompt:
    """A prompt that was sent to an engine."""

    def __init__(self, load: InFlightLoad) -> None:
        self.load = load
        """What it adds to the engine's load."""
        self.is_taken = False
        """Whether the engine has taken it. Then its prefix cache has it."""


class EngineRegistry:
    """The engines of one role, in the order in which they were added. There is one engine per URL.

    The event loop's thread owns it. Engines of the command line are added before the loop runs.
    """

    def __init__(self, role: EngineRole, limiter: ConcurrencyLimiter, settings: ProxySettings) -> None:
        """`limiter`: has the engines' slots. It is told which of them may get requests."""
        self.role = role
        self.mean_tokens = _FIRST_MEAN_TOKENS
        """Mean length of the prompts sent so far. Only `sending` changes it."""
        self._limiter = limiter
        self.affinity = PrefixAffinity(prefill_costs if role is EngineRole.PREFILL else decode_costs)
        """Ranks them. It is told which engines may have lost their prefix cache."""
        self._limits = settings.eject_after, settings.return_after
        """Of each engine's `HealthGate`."""
        self._fresh = _MISSED_CHECKS * settings.check_interval + 2 * settings.health_timeout
        """Seconds for which an engine's own load report is used."""
        self._new_need_check = False
        """Whether engines added from now on are asked last until a check is good."""
        self._engines: dict[str, RegisteredEngine] = {}
        """By URL."""
        self._leaving: dict[str, RegisteredEngine] = {}
        """Removed engines that had requests in flight when one was last removed, by URL."""

    def __iter__(self) -> Iterator[RegisteredEngine]:
        return iter(tuple(self._engines.values()))

    def get(self, url: str) -> RegisteredEngine | None:
        return self._engines.get(url)

    def by_id(self, engine_id: str) -> RegisteredEngine | None:
        return next((engine for engine in self if engine.id == engine_id), None)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the engines that may get requests, ejected ones included."""
        return tuple(engine.url for engine in self if engine.open)

    def well(self, now: float) -> list[RegisteredEngine]:
        """The engines that may get requests and are not doubtful. Those without a free slot count, too."""
        return [engine for engine in self if engine.open and not engine.gate.doubtful(now)]

    # Which engines there are.

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
            gate = HealthGate(*self._limits, proven=not self._new_need_check)
            engine = self._leaving.pop(url, None)
            if engine is None:
                engine = RegisteredEngine(self.role, url, gate)
            else:  # its requests count in its limits, as before
                engine.come_back(gate)
            self._engines[url] = engine
            log.info("%s engine %s: added by %s", self.role.value, url, source)
        engine.sources.add(source)
        return engine

    def remove(self, engine: RegisteredEngine) -> None:
        if self._engines.get(engine.url) is engine:
            del self._engines[engine.url]
            engine.removed = True
            self.affinity.forget(engine.url)
            self._limiter.engine_closed(engine)
            left = {**self._leaving, engine.url: engine}
            self._leaving = {url: each for url, each in left.items() if self._limiter.in_use(each)}

    def replace(self, source: str, urls: Collection[str]) -> None:
        """Makes `urls` the engines that `source` lists. An engine that no source lists any more is removed. Raises
        TooManyEnginesError if some could not be added."""
        for engine in self:
            if source in engine.sources and engine.url not in urls:
                engine.sources.discard(source)
                if not engine.sources:
                    self.remove(engine)
                    log.info("%s engine %s: removed by %s", self.role.value, engine.url, source)
        for url in urls:
            self.add(url, source)

    # What happens to them.

    @owned
    def drain(self, engine: RegisteredEngine) -> None:
        """Stops new requests to an engine. It finishes those that it has."""
        engine.draining = True
        self._limiter.engine_closed(engine)
        log.info("%s engine %s: drains", self.role.value, engine.url)

    @owned
    def undrain(self, engine: RegisteredEngine) -> None:
        engine.draining = False
        if not engine.gate.shut:
            self._limiter.engine_opened(engine)
        log.info("%s engine %s: gets requests again", self.role.value, engine.url)

    @owned
    def checked(self, engine: RegisteredEngine, reason: str | None, at_once: bool = False) -> bool:
        """Records a health check. Arguments and result: as for `HealthGate.checked`."""
        was_shut = engine.gate.shut
        changed = engine.gate.checked(reason, at_once)
        if changed and not engine.removed:  # it may have been restarted
            self.affinity.forget(engine.url)
        if was_shut and not engine.gate.shut:
            self._limiter.engine_opened(engine)
        return changed

    # Which one gets a prompt.

    @owned
    def rank(
        self,
        prompt: PromptEstimate,
        avoid: Collection[str] = (),
        group: RequestGroup | None = None,
        doubted: Collection[str] = (),
    ) -> EngineRanking:
        """Ranks all engines that may get requests, except those in `avoid`. Doubtful engines, and those in `doubted`,
        form the last tier."""
        now = time.monotonic()
        engines = {engine.url: engine for engine in self if engine.open and engine.url not in avoid}
        ranked = self.affinity.order(prompt, [self.load(engine, now) for engine in engines.values()])
        doubtful = tuple(url for url in ranked if url in doubted or engines[url].gate.doubtful(now))
        well = tuple(url for url in ranked if url not in doubtful)
        return EngineRanking(prompt, (well, doubtful), avoid, group=group)

    def load(self, engine: RegisteredEngine, now: float) -> EngineLoad:
        """The load of an engine, from its own report and from what this proxy has sent."""
        return load_of(self.role, engine.url, engine.sent, engine.report(now, self._fresh), self.mean_tokens)

    def reported(self, engine: RegisteredEngine, now: float) -> LoadSnapshot:
        """What the engine itself has lately reported of its load."""
        report = engine.report(now, self._fresh)
        return LoadSnapshot() if report is None else report.snapshot

    @owned
    @contextmanager
    def sending(self, prompt: PromptEstimate, url: str) -> Iterator[SentPrompt]:
        """The time in which a prompt is at an engine. It counts as cached there, and afterwards if it was taken."""
        if prompt.sequences:
            self.mean_tokens += (prompt.tokens - self.mean_tokens) / _MEAN_OVER_PROMPTS
        sent = SentPrompt(InFlightLoad(prompt.sequences, self.affinity.sent(prompt, url)))
        try:
            yield sent
        finally:
            self.affinity.ended(prompt, url, sent.is_taken)
