# SPDX-License-Identifier: Apache-2.0
"""One engine: what the proxy knows of its health, its load and its requests. No I/O."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.load import InFlightLoad, LoadReport, LoadSnapshot

_PASSED_OVER_SECONDS = 10.0
"""After this time an engine that was passed over gets requests again. One more failure then passes it over for as long
again."""


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
        were = self.passed_over(now)
        self.failures, self.how = (0, "") if how is None else (self.failures + 1, how)
        self._passed_over_until = now + _PASSED_OVER_SECONDS if self.is_long else float("-inf")
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

    def passed_over(self, now: float) -> bool:
        """Whether other engines are asked first because many requests or transfers in a row failed here."""
        return self.requests.passed_over(now) or self.transfers.passed_over(now)

    def doubtful(self, now: float) -> bool:
        """Whether healthy engines should be asked first."""
        return self.shut or self.passed_over(now)

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


class RegisteredEngine:
    """One engine, and what the proxy knows about it."""

    def __init__(self, role: EngineRole, url: str, gate: HealthGate) -> None:
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
        """What this proxy has in flight there. Only `serving` changes it."""
        self._report: LoadReport | None = None
        """The last load report."""
        self.same_tokens_since = float("-inf")
        """When the engine first reported the token count of its last report. Only `note` changes it."""

    @property
    def open(self) -> bool:
        """Whether it may get requests."""
        return not (self.draining or self.removed)

    def state(self, now: float) -> tuple[EngineState, str | None]:
        """Its state, and the reason if it is neither healthy nor draining."""
        return (EngineState.DRAINING, None) if self.draining else self.gate.state(now)

    def come_back(self, gate: HealthGate) -> None:
        """Is added again after its removal, with requests of before still in flight. Nothing else is known of it."""
        self.gate, self.removed, self.draining, self._report = gate, False, False, None
        self.sources.clear()

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
            self.same_tokens_since = now
        self._report = LoadReport(snapshot, sent, now)

    @property
    def asleep(self) -> bool:
        """Whether a part of it sleeps, by its last metrics."""
        return self._report is not None and self._report.snapshot.asleep

    @property
    def broken(self) -> str | None:
        """Why the engine can serve nothing now, by its last metrics: it sleeps, or must be restarted. None: it can."""
        if self.asleep:
            return "it sleeps"
        ranks = 0 if self._report is None else self._report.snapshot.broken_ranks or 0
        return f"it must be restarted: KV exchange has failed for good on {ranks} rank(s)" if ranks else None

    def computed_nothing(self, since: float) -> float:
        """Seconds after `since` in which the engine computed no token, by its own metrics; 0 if it has sent none."""
        return 0.0 if self._report is None else self._report.at - max(since, self.same_tokens_since)

    def report(self, now: float, fresh_for: float) -> LoadReport | None:
        """The last load report, unless it is older than `fresh_for` seconds."""
        return self._report if self._report is not None and now - self._report.at <= fresh_for else None
