# SPDX-License-Identifier: Apache-2.0
"""One engine: what the proxy knows of its health, its load and its requests. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.load import InFlightLoad, LoadReport, LoadSnapshot

_PASSED_OVER_SECONDS = 10.0
"""After this time an engine that was passed over gets requests again. One more failure then passes it over for as long
again."""
_FIRST_PAUSE_SECONDS = 10.0
"""An engine that refuses what others take gets one request after this pause. Each refusal of one doubles the pause."""
_LONGEST_PAUSE_SECONDS = 300.0
_NOT_CHECKED = "not checked yet"


class HealthGate:
    """Ejects an engine after `eject_after` failed checks in a row, and returns it after `return_after` good ones.

    It also ejects an engine that refuses `eject_after` requests in a row which other engines take. Checks do not end
    that: after a pause, one request tries whether the engine takes requests again.

    An engine at which `eject_after` requests in a row fail is passed over for a while. Its checks may be good, and it
    looks idle, so it would otherwise get the next request, too.
    """

    def __init__(self, eject_after: int, return_after: int, proven: bool = True) -> None:
        """`proven`: False for an engine that needs a good check before it is treated like the others."""
        self.proven = proven
        """Whether a check was good, or none was needed."""
        self.last_check = _NOT_CHECKED
        """"ok", or why the last check failed."""
        self._unhealthy = False
        """Whether too many checks in a row have failed."""
        self._check_reason = ""
        """Why the last failed check failed."""
        self._limits = {False: eject_after, True: return_after}
        """Number of checks in a row that change `_unhealthy`, by its current value."""
        self._against = 0
        """Number of the latest checks in a row that contradict `_unhealthy`."""
        self._refusals = 0
        """Number of requests in a row that it refused and others took."""
        self._refusal = ""
        """How it refused the last of them."""
        self._pause = 0.0
        """Seconds between two trials; 0 unless it is ejected for its refusals."""
        self._closed_until = 0.0
        """When the next trial may begin, on the clock of `refused`."""
        self._on_trial = False
        """Whether a trial was sent and not answered yet."""
        self._failures = 0
        """Number of the latest requests that failed in a row."""
        self._passed_over_until = float("-inf")
        """On the clock of `ended`."""

    def checked(self, reason: str | None, at_once: bool = False) -> bool:
        """Records a check.

        Args:
            reason: why the check failed; None if it was good.
            at_once: whether this check alone is enough to eject or return the engine. An engine that reports itself as
                broken needs no further check.

        Returns whether this check ejected the engine or returned it.
        """
        self.last_check = reason or "ok"
        if reason is None:
            self.proven = True
        else:
            self._check_reason = reason
        if (reason is None) is not self._unhealthy:
            self._against = 0
            return False
        self._against += 1
        if self._against < self._limits[self._unhealthy] and not at_once:
            return False
        self._unhealthy, self._against = not self._unhealthy, 0
        return True

    def refused(self, how: str, now: float) -> bool:
        """Records that it refused a request which another engine took. `now`: seconds of a steady clock.

        Returns whether that ejected it.
        """
        self._refusals += 1
        self._refusal = how
        ejects = not self._pause and self._refusals >= self._limits[False]
        if ejects:
            self._pause = _FIRST_PAUSE_SECONDS
        elif self._on_trial:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        self._on_trial = False
        self._closed_until = now + self._pause
        return ejects

    def took(self) -> bool:
        """Records that it took a request. Returns whether that ended its ejection for refusals."""
        returned = self._pause > 0
        self._refusals, self._pause, self._on_trial = 0, 0.0, False
        return returned

    def ended(self, well: bool, now: float) -> None:
        """Records the end of a request that it took. `now`: seconds of a steady clock."""
        self._failures = 0 if well else self._failures + 1
        passes = self._failures >= self._limits[False]
        self._passed_over_until = now + _PASSED_OVER_SECONDS if passes else float("-inf")

    def passed_over(self, now: float) -> bool:
        """Whether other engines are asked first because many requests in a row failed here."""
        return now < self._passed_over_until

    def doubtful(self, now: float) -> bool:
        """Whether healthy engines should be asked first."""
        return (self.shut and not self.trial_due(now)) or self.passed_over(now)

    def trial_due(self, now: float) -> bool:
        """Whether the next request should try if it takes requests again."""
        return self._pause > 0 and now >= self._closed_until and not self._unhealthy

    def sent(self, now: float) -> None:
        """Records that it gets a request. If a trial was due, the next one is due after another pause."""
        if self.trial_due(now):
            self._on_trial = True
            self._closed_until = now + self._pause

    @property
    def ejected(self) -> bool:
        """Whether too many checks or requests in a row have failed."""
        return self._unhealthy or self._pause > 0

    @property
    def reason(self) -> str:
        """Why it is ejected, or why the last failed check failed."""
        if self._pause and not self._unhealthy:
            return f"refused {self._refusals} requests that others took: {self._refusal}"
        return self._check_reason

    @property
    def shut(self) -> bool:
        """Whether the engine gets requests only if no other engine is left, trials apart."""
        return self.ejected or not self.proven

    @property
    def known(self) -> bool:
        """Whether any check has ended."""
        return self.last_check != _NOT_CHECKED

    @property
    def failing(self) -> bool:
        """Whether the last check failed but the engine is not ejected."""
        return not self.ejected and self._against > 0

    @property
    def well(self) -> bool:
        """Whether no check speaks against it."""
        return not self._unhealthy and self._against == 0


class RegisteredEngine:
    """One engine, and what the proxy knows about it."""

    def __init__(self, role: EngineRole, url: str, gate: HealthGate) -> None:
        self.role = role
        self.url = url
        self.id = f"{role.value}-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"
        """The same in every proxy and after every start."""
        self.gate = gate
        """State of its health checks, refusals and failures."""
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
        self._same_tokens_since = float("-inf")
        """When the engine first reported the token count of its last report."""

    @property
    def open(self) -> bool:
        """Whether it may get requests."""
        return not (self.draining or self.removed)

    def served(self, well: bool, now: float) -> None:
        """Records the end of a request. Failures that are not the engine's fault are not recorded."""
        self.gate.ended(well, now)

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
        self._report = LoadReport(snapshot, sent, now)

    @property
    def broken(self) -> str | None:
        """Why the engine must be restarted, by its last metrics. None: they report no such thing."""
        ranks = 0 if self._report is None else self._report.snapshot.broken_ranks or 0
        return f"it must be restarted: KV exchange has failed for good on {ranks} rank(s)" if ranks else None

    def computed_nothing(self, since: float) -> float:
        """Seconds after `since` in which the engine computed no token, by its own metrics; 0 if it has sent none."""
        return 0.0 if self._report is None else self._report.at - max(since, self._same_tokens_since)

    def report(self, now: float, fresh_for: float) -> LoadReport | None:
        """The last load report, unless it is older than `fresh_for` seconds."""
        return self._report if self._report is not None and now - self._report.at <= fresh_for else None
