# SPDX-License-Identifier: Apache-2.0
"""Decides, from health checks and failed requests, whether other engines should be asked before an engine. No I/O."""

from __future__ import annotations

# After this time an avoided engine gets requests again. One more failure then avoids it for as long again.
_AVOID_SECONDS = 10.0
# An engine that refuses what others take gets one request after this pause. Each refusal of one doubles the pause.
_FIRST_PAUSE_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 300.0


class HealthGate:
    """Ejects an engine after `eject_after` failed checks in a row, and returns it after `return_after` good ones.

    It also ejects an engine that refuses `eject_after` requests in a row which other engines take. Checks do not end
    that: after a pause, one request tries whether the engine takes requests again.
    """

    def __init__(self, eject_after: int, return_after: int, proven: bool = True) -> None:
        """`proven`: False for an engine that needs a good check before it is treated like the others."""
        self.proven = proven
        """Whether a check was good, or none was needed."""
        self.known = False
        """Whether any check has ended."""
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

    def checked(self, reason: str | None, at_once: bool = False) -> bool:
        """Records a check.

        Args:
            reason: why the check failed; None if it was good.
            at_once: whether this check alone is enough to eject or return the engine. An engine that reports itself as
                broken needs no further check.

        Returns whether this check ejected the engine or returned it.
        """
        self.known = True
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
    def failing(self) -> bool:
        """Whether the last check failed but the engine is not ejected."""
        return not self.ejected and self._against > 0

    @property
    def well(self) -> bool:
        """Whether no check speaks against it."""
        return not self._unhealthy and self._against == 0


class FailureStreak:
    """Counts requests that fail in a row at one engine, and tells when to avoid it for a while.

    Requests can fail at an engine whose health checks are good. Such an engine looks idle, so without this it would
    get the next request too.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: number of failures in a row after which the engine is avoided."""
        self._limit = limit
        self._failures = 0
        """Number of the latest requests that failed in a row."""
        self._avoid_until = float("-inf")
        """On the clock of `ended`."""

    def ended(self, well: bool, now: float) -> None:
        """Records the end of a request. `now`: seconds of a steady clock."""
        self._failures = 0 if well else self._failures + 1
        self._avoid_until = now + _AVOID_SECONDS if self._failures >= self._limit else float("-inf")

    def avoided(self, now: float) -> bool:
        """Whether other engines should be preferred."""
        return now < self._avoid_until
