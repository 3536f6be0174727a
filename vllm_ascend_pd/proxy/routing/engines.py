# SPDX-License-Identifier: Apache-2.0
"""The engines of one role: what the proxy knows of each, and in which order they are asked with a prompt. No I/O.

Engines are added, drained and removed while requests are in flight. A removed engine gets no new requests. Requests
that it already has continue: they need no entry here.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.load import EngineLoad, InFlightLoad, LoadReport, LoadSnapshot, load_of
from vllm_ascend_pd.proxy.routing.queue import HasSlots, Queue
from vllm_ascend_pd.proxy.routing.strategies import PrefixAffinity, PromptEstimate, decode_costs, prefill_costs
from vllm_ascend_pd.proxy.settings import ProxySettings

log = logging.getLogger(__name__)

_PASSED_OVER_SECONDS = 10.0
"""After this time an engine that was passed over gets requests again. One more failure then passes it over for as long
again."""

MAX_ENGINES = 512
"""Engines per role. Each one is polled, which takes a connection."""
_MEAN_OVER_PROMPTS = 32
"""The mean prompt length is an exponential average: each prompt counts 1/32."""
_FIRST_MEAN_TOKENS = 512.0
"""The mean length before the first prompt."""
_MISSED_CHECKS = 3
"""After so many failed checks, an engine's last reported load is too old."""


class EngineState(enum.Enum):
    """The state of an engine, in `/health`, in the admin API and on the status page."""

    NEW = "new"
    """No check has been good yet. If it was added while the proxy runs, others come first."""
    HEALTHY = "healthy"
    FAILING = "failing"
    """The last check failed. It still gets requests, until more checks fail."""
    PASSED_OVER = "passed over"
    """Checks are good, but requests failed there, or were refused and taken by others. Others come first for a
    while."""
    EJECTED = "ejected"
    """Its checks fail. Others come first."""
    DRAINING = "draining"
    """An operator drains it: it gets no requests."""


USABLE = (EngineState.HEALTHY, EngineState.FAILING, EngineState.PASSED_OVER)
"""States of an engine that can be expected to answer."""


class Streak:
    """Failures in a row. After `limit` of them, what fails is passed over for a while. Then one more is enough."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.failures = 0
        self.how = ""
        """How the last of them failed."""
        self._passed_over_until = float("-inf")
        """On the clock of `ended`."""

    def ended(self, how: str | None, now: float) -> bool:
        """Records a result.

        `how`: how it failed; None if it did not. `now`: seconds of a steady clock. Returns whether others come first
        from now on, and did not before.
        """
        if how is None:
            self.failures, self.how, self._passed_over_until = 0, "", float("-inf")
            return False
        were = self.passed_over(now)
        self.failures, self.how = self.failures + 1, how
        if self.is_long:
            self._passed_over_until = now + _PASSED_OVER_SECONDS
        return self.is_long and not were

    @property
    def is_long(self) -> bool:
        return self.failures >= self._limit

    def passed_over(self, now: float) -> bool:
        """Whether others come first."""
        return now < self._passed_over_until


class HealthGate:
    """Ejects an engine after `eject_after` failed checks in a row, and returns it after `return_after` good ones. An
    engine that was added while the proxy runs comes last until a check is good.

    An engine at which `eject_after` requests in a row fail, or which refuses them while other engines take them, is
    passed over for a while, and so is one of whose transfers as many fail. Its checks may be good, and it looks idle,
    so it would otherwise get the next request, too.
    """

    def __init__(self, eject_after: int, return_after: int, proven: bool = True) -> None:
        """`proven`: False for an engine that needs a good check before it is treated like the others."""
        self.checked_once = False
        """Whether any check has ended."""
        self.answered_once = False
        """Whether any check was good."""
        self._needs_answer = not proven
        self.ejected = False
        """Whether too many checks in a row have failed."""
        self._check_reason = "not checked yet"
        """Why the last failed check failed."""
        self._limits = {False: eject_after, True: return_after}
        """Number of checks in a row that change `ejected`, by its current value."""
        self._against = 0
        """Number of the latest checks in a row that contradict `ejected`."""
        self.requests = Streak(eject_after)
        """Requests that failed, or were refused and taken by others."""
        self.transfers = Streak(eject_after)
        """Failed transfers for which the other engines' results blame this one. Apart from `requests`: a decode engine
        that gets no KV still answers requests whose prompts it has or computes."""

    def checked(self, reason: str | None, at_once: bool = False) -> bool:
        """Records a check.

        Args:
            reason: why the check failed; None if it was good.
            at_once: whether this check alone is enough to eject or return the engine. An engine that reports itself as
                broken needs no further check.

        Returns whether this check ejected the engine or returned it.
        """
        self.checked_once = True
        if reason is None:
            self.answered_once = True
        else:
            self._check_reason = reason
        if (reason is None) is not self.ejected:
            self._against = 0
            return False
        self._against += 1
        if self._against < self._limits[self.ejected] and not at_once:
            return False
        self.ejected, self._against = not self.ejected, 0
        return True

    def doubtful(self, now: float) -> bool:
        """Whether other engines are asked first: its checks say so, or many requests or transfers in a row failed."""
        return self.shut or self.requests.passed_over(now) or self.transfers.passed_over(now)

    @property
    def shut(self) -> bool:
        """Whether its checks keep requests from it while another engine is left."""
        return self.ejected or (self._needs_answer and not self.answered_once)

    @property
    def answers(self) -> bool:
        """Whether the last check was good."""
        return self.checked_once and (self._against > 0) is self.ejected

    def state(self, now: float) -> tuple[EngineState, str | None]:
        """The state by checks and requests, and the reason if it is not healthy."""
        if self.ejected:
            return EngineState.EJECTED, self._check_reason
        if not self.answered_once:
            return EngineState.NEW, self._check_reason
        if self._against:
            return EngineState.FAILING, self._check_reason
        for streak, what in ((self.requests, "requests"), (self.transfers, "transfers")):
            if streak.passed_over(now):
                return EngineState.PASSED_OVER, f"{streak.failures} {what} in a row failed there: {streak.how}"
        return EngineState.HEALTHY, None


class RegisteredEngine(HasSlots):
    """One engine, and what the proxy knows about it."""

    def __init__(self, role: EngineRole, url: str, gate: HealthGate) -> None:
        super().__init__()
        self.role = role
        self.url = url
        self.id = f"{role.value}-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"
        """The same in every proxy and after every start."""
        self.gate = gate
        """What its health checks and its requests say."""
        self.draining = False
        """Whether an operator drains it. Only the registry changes it."""
        self.removed = False
        """Whether it has been removed. Only the registry changes it."""
        self.sources: set[str] = set()
        """What lists it: the command line, a DNS name, the admin API. Only the registry changes it."""
        self.sent = InFlightLoad()
        """What this proxy has in flight there. Only the registry changes it."""
        self._load_report: LoadReport | None = None
        """The last load report."""
        self.same_tokens_since = float("-inf")
        """When the engine first reported the token count of its last report. Only `note` changes it."""

    @property
    def takes_requests(self) -> bool:
        """Whether it may get requests."""
        return not (self.draining or self.removed)

    def state(self, now: float) -> tuple[EngineState, str | None]:
        """Its state, and the reason if it is neither healthy nor draining."""
        return (EngineState.DRAINING, None) if self.draining else self.gate.state(now)

    def come_back(self, gate: HealthGate) -> None:
        """Is added again after its removal, with requests of before still in flight. Nothing else is known of it."""
        self.gate, self.removed, self.draining, self._load_report = gate, False, False, None
        self.sources.clear()

    def note(self, snapshot: LoadSnapshot, sent: InFlightLoad, now: float) -> None:
        """Records what the engine reports of its load.

        `sent`: what this proxy had in flight there when it asked. `now`: seconds of a steady clock.
        """
        if self._load_report is None or snapshot.tokens is None or snapshot.tokens != self._load_report.snapshot.tokens:
            self.same_tokens_since = now
        self._load_report = LoadReport(snapshot, sent, now)

    @property
    def asleep(self) -> bool:
        """Whether a part of it sleeps, by its last metrics."""
        return self._load_report is not None and self._load_report.snapshot.asleep

    @property
    def broken(self) -> str | None:
        """Why the engine can serve nothing now, by its last metrics: it sleeps, or must be restarted. None: it can."""
        if self.asleep:
            return "it sleeps"
        ranks = 0 if self._load_report is None else self._load_report.snapshot.broken_ranks or 0
        return f"it must be restarted: KV exchange has failed for good on {ranks} rank(s)" if ranks else None

    def computed_nothing(self, since: float) -> float:
        """Seconds after `since` in which the engine computed no token, by its own metrics; 0 if it has sent none."""
        return 0.0 if self._load_report is None else self._load_report.at - max(since, self.same_tokens_since)

    def load_report(self, now: float, fresh_for: float) -> LoadReport | None:
        """The last load report, unless it is older than `fresh_for` seconds."""
        return self._load_report if self._load_report is not None and now - self._load_report.at <= fresh_for else None


class TooManyEnginesError(Exception):
    """There are `MAX_ENGINES` engines of the role already."""


class EngineRanking(NamedTuple):
    """The engines to ask for one prompt, best first."""

    prompt: PromptEstimate
    tiers: tuple[tuple[str, ...], ...]
    """URLs. An engine is asked, or waited for, only if no engine of the earlier tiers can be reached."""
    avoid: Collection[str] = ()
    """URLs of engines not to ask, should they become available while the request waits."""
    doubted: Collection[str] = ()
    """URLs of engines that come after others for this prompt, though they may be well."""

    @property
    def takes_slot(self) -> bool:
        """Whether the engine computes anything for the request. Others are neither limited nor queued."""
        return self.prompt.sequences > 0

    @property
    def first(self) -> tuple[str, ...]:
        """The engines of which one gets the request, unless none of them can be reached."""
        return next((tier for tier in self.tiers if tier), ())


class EngineRegistry:
    """The engines of one role, in the order in which they were added. There is one engine per URL.

    `HealthChecks` alone records checks and load reports, `EnginePool` alone what is in flight and how it ended, and
    `Deliveries` how transfers ended. The event loop's thread owns it. Engines of the command line are added before the
    loop runs.
    """

    def __init__(self, role: EngineRole, queue: Queue[RegisteredEngine], settings: ProxySettings) -> None:
        """`queue`: gives the engines' slots. It is told which of them may get requests."""
        self.role = role
        self.mean_tokens = _FIRST_MEAN_TOKENS
        """Mean length of the prompts sent so far. Only `sent` changes it."""
        self._queue = queue
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

    def with_requests(self, url: str) -> RegisteredEngine | None:
        """As `get`, and also an engine that was removed and may still have requests."""
        return self._engines.get(url) or self._leaving.get(url)

    def by_id(self, engine_id: str) -> RegisteredEngine | None:
        return next((engine for engine in self if engine.id == engine_id), None)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the engines that may get requests, ejected ones included."""
        return tuple(engine.url for engine in self if engine.takes_requests)

    def well(self, now: float) -> list[RegisteredEngine]:
        """The engines that may get requests and are not doubtful. Those without a free slot count, too."""
        return [engine for engine in self if engine.takes_requests and not engine.gate.doubtful(now)]

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
            self._queue.closed(engine)
            left = {**self._leaving, engine.url: engine}
            self._leaving = {url: each for url, each in left.items() if each.slots_used}

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
        self._queue.closed(engine)
        log.info("%s engine %s: drains", self.role.value, engine.url)

    @owned
    def undrain(self, engine: RegisteredEngine) -> None:
        engine.draining = False
        self._tell_queue(engine)
        log.info("%s engine %s: gets requests again", self.role.value, engine.url)

    @owned
    def checked(self, engine: RegisteredEngine, reason: str | None, at_once: bool = False) -> bool:
        """Records a health check. Arguments and result: as for `HealthGate.checked`."""
        changed = engine.gate.checked(reason, at_once)
        if changed and not engine.removed:  # it may have been restarted
            self.affinity.forget(engine.url)
        self._tell_queue(engine)
        return changed

    def _tell_queue(self, engine: RegisteredEngine) -> None:
        """Lets requests that wait use an engine. While it is doubtful and others are not, those that may use one of
        these do not get it."""
        if not self._queue.waiting:
            return
        now = time.monotonic()
        if engine.gate.doubtful(now) and (well := self.well(now)):
            self._queue.put_last(engine, well)
        elif engine.takes_requests:
            self._queue.opened(engine, engine.url)

    # Which one gets a prompt.

    @owned
    def rank(
        self,
        prompt: PromptEstimate,
        avoid: Collection[str] = (),
        doubted: Collection[str] = (),
        last: Sequence[str] = (),
    ) -> EngineRanking:
        """Ranks all engines that may get requests, except those in `avoid`. Doubtful engines, and those in `doubted`,
        come after the others, and engines in `last` after those."""
        now = time.monotonic()
        engines = {engine.url: engine for engine in self if engine.takes_requests and engine.url not in avoid}
        ranked = self.affinity.order(prompt, [self.load(engine, now) for engine in engines.values()])
        doubtful = tuple(url for url in ranked if url in doubted or engines[url].gate.doubtful(now))
        well = tuple(url for url in ranked if url not in doubtful)
        return EngineRanking(prompt, (well, doubtful, tuple(last)), avoid, doubted)

    def load(self, engine: RegisteredEngine, now: float) -> EngineLoad:
        """The load of an engine, from its own report and from what this proxy has sent."""
        return load_of(self.role, engine.url, engine.sent, engine.load_report(now, self._fresh), self.mean_tokens)

    def reported_load(self, engine: RegisteredEngine, now: float) -> LoadSnapshot:
        """What the engine itself has lately reported of its load."""
        report = engine.load_report(now, self._fresh)
        return LoadSnapshot() if report is None else report.snapshot

    @owned
    def sent(self, prompt: PromptEstimate, engine: RegisteredEngine) -> InFlightLoad:
        """A prompt goes to an engine, where it counts as cached from now on. Returns its load. Call `ended` in any
        case."""
        if prompt.tokens:
            self.mean_tokens += (prompt.tokens - self.mean_tokens) / _MEAN_OVER_PROMPTS
        load = InFlightLoad(prompt.sequences, self.affinity.sent(prompt, engine.url))
        engine.sent = InFlightLoad(engine.sent.requests + load.requests, engine.sent.tokens + load.tokens)
        return load

    @owned
    def ended(self, prompt: PromptEstimate, engine: RegisteredEngine, load: InFlightLoad, is_taken: bool) -> None:
        """The prompt is there no longer. It still counts as cached if the engine has taken it."""
        engine.sent = InFlightLoad(engine.sent.requests - load.requests, engine.sent.tokens - load.tokens)
        self.affinity.ended(prompt, engine.url, is_taken)
