# SPDX-License-Identifier: Apache-2.0
"""Ranks the engines of one role for a prompt, by load, prefix caches and health. No I/O."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.routing.balance import EngineLoad, Strategy
from vllm_ascend_pd.proxy.routing.concurrency import RequestGroup
from vllm_ascend_pd.proxy.routing.load import InFlightLoad, LoadSnapshot, decode_load, prefill_load
from vllm_ascend_pd.proxy.routing.prompts import PromptEstimate
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry, EngineRole, RegisteredEngine

# The mean prompt length is an exponential average: each prompt counts 1/32.
_MEAN_OVER_PROMPTS = 32
# The mean length before the first prompt, in tokens.
_FIRST_MEAN_TOKENS = 512.0


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
    def first(self) -> str:
        """URL of the best engine; empty if there is none."""
        return next((url for tier in self.tiers for url in tier), "")

    def then(self, urls: Sequence[str]) -> EngineRanking:
        """This ranking with one more tier at the end."""
        return self._replace(tiers=(*self.tiers, tuple(urls)))

    def of_one_admitted(self) -> EngineRanking:
        return self._replace(admitted=True)

    def beside(self, url: str) -> EngineRanking:
        """The engines whose answer counts as much as that of `url`: without doubtful ones, unless it is one itself."""
        return self._replace(tiers=self.tiers[:1]) if self.tiers and url in self.tiers[0] else self


class EngineRanker:
    """Ranks the engines of one role by their load, with a strategy. The event loop's thread owns it."""

    def __init__(self, engines: EngineRegistry, strategy: Strategy, *, fresh_for: float) -> None:
        """`fresh_for`: seconds for which an engine's own load report is used."""
        self._engines = engines
        self._strategy = strategy
        self._fresh_for = fresh_for
        self._load = prefill_load if engines.role is EngineRole.PREFILL else decode_load
        self.mean_tokens = _FIRST_MEAN_TOKENS
        """Mean length of the prompts sent so far. Only `count_sent` changes it."""

    @owned
    def rank(
        self, prompt: PromptEstimate, avoid: Collection[str] = (), group: RequestGroup | None = None
    ) -> EngineRanking:
        """Ranks all engines that may get requests, except those in `avoid`. Doubtful engines form the last tier.

        An engine whose trial is due comes first: otherwise it might never get one.
        """
        now = time.monotonic()
        engines = {engine.url: engine for engine in self._engines if engine.open and engine.url not in avoid}
        ranked = self._strategy.order(prompt, [self.load(engine, now) for engine in engines.values()])
        doubtful = tuple(url for url in ranked if engines[url].doubtful(now))
        well = sorted(
            (url for url in ranked if url not in doubtful), key=lambda url: not engines[url].gate.trial_due(now)
        )
        tiers = (tuple(well), doubtful)
        return EngineRanking(prompt, tiers, avoid, group=group)

    def load(self, engine: RegisteredEngine, now: float) -> EngineLoad:
        """The load of an engine, from its own report and from what this proxy has sent."""
        return self._load(engine.url, engine.sent, engine.report(now, self._fresh_for), self.mean_tokens)

    def reported(self, engine: RegisteredEngine, now: float) -> LoadSnapshot | None:
        """What the engine itself reports of its load; None if it has reported nothing lately."""
        report = engine.report(now, self._fresh_for)
        return None if report is None else report.snapshot

    @owned
    def count_sent(self, prompt: PromptEstimate, url: str) -> InFlightLoad:
        """Notes that a prompt goes to an engine. Returns what that adds to the engine's load."""
        if prompt.sequences:
            self.mean_tokens += (prompt.tokens - self.mean_tokens) / _MEAN_OVER_PROMPTS
        return InFlightLoad(prompt.sequences, self._strategy.sent(prompt, url))
