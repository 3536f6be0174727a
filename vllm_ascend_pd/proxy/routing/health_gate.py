# SPDX-License-Identifier: Apache-2.0
"""Decides, from health checks and failed requests, whether other engines should be asked before an engine. No I/O."""

from __future__ import annotations

# After this time an avoided engine gets requests again. One more failure then avoids it for as long again.
_AVOID_SECONDS = 10.0


class HealthGate:
    """Ejects an engine after `eject_after` failed checks in a row, and returns it after `return_after` good ones."""

    def __init__(self, eject_after: int, return_after: int, proven: bool = True) -> None:
        """`proven`: False for an engine that needs a good check before it is treated like the others."""
        self.proven = proven
        """Whether a check was good, or none was needed."""
        self.ejected = False
        """Whether too many checks in a row have failed."""
        self.known = False
        """Whether any check has ended."""
        self.reason = ""
        """Why the last failed check failed."""
        self._limits = {False: eject_after, True: return_after}
        """Number of checks in a row that change `ejected`, by its current value."""
        self._against = 0
        """Number of the latest checks in a row that contradict `ejected`."""

    def checked(self, reason: str | None, at_once: bool = False) -> bool:
        """Records a check.

        Args:
            reason: why the check failed; None if it was good.
            at_once: whether this check alone is enough to change `ejected`. An engine that reports itself as broken
                needs no further check.

        Returns whether this check ejected the engine or returned it.
        """
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
        """Whether the engine gets requests only if no other engine is left."""
        return self.ejected or not self.proven

    @property
    def failing(self) -> bool:
        """Whether the last check failed but the engine is not ejected."""
        return not self.ejected and self._against > 0


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
