# SPDX-License-Identifier: Apache-2.0
"""Compares the clocks of hosts by the Date header of HTTP answers.

A Date is a whole second. uvicorn, which vLLM and our proxy are served by, writes it anew once a second, so when it is
read the server's clock is between that second and two later; the way there and back adds to that. All in seconds.
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import NamedTuple

from vllm_ascend_pd.core.ticket import CLOCK_SKEW_S
from vllm_ascend_pd.tools.doctor.finding import Finding, error, note, ok, warning

_DATE_S = 1.0
_REFRESHED_S = 1.0
NOTICEABLE_S = 5.0
"""NTP keeps clocks within a fraction of a second. A larger difference means that it does not run."""


class OffsetRange(NamedTuple):
    """One clock is ahead of another by `low` to `high` seconds."""

    low: float
    high: float

    @property
    def least(self) -> float:
        """The smallest possible difference, in either direction."""
        return max(0.0, self.low, -self.high)

    def __str__(self) -> str:
        return f"{(self.low + self.high) / 2:+.1f} s (known to {(self.high - self.low) / 2:.1f} s either way)"


def offset(date: str, sent: float, received: float) -> OffsetRange | None:
    """Returns the offset of a server's clock to this host's clock, or None if `date` cannot be parsed.

    `date` is the server's header, `sent` and `received` are times of this host's clock.
    """
    try:
        second = parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return OffsetRange(second - received, second + _DATE_S + _REFRESHED_S - sent)


def between(one: OffsetRange, other: OffsetRange) -> OffsetRange:
    """Returns the offset between two servers' clocks from their offsets to this host's clock."""
    return OffsetRange(one.low - other.high, one.high - other.low)


def judge(check: str, what: str, apart: OffsetRange | None) -> Finding:
    """`what` names the two clocks."""
    if apart is None:
        return note(check, f"{what}: unknown, without a Date in the answer")
    found = f"{what}: {apart}"
    figures = {"low": round(apart.low, 3), "high": round(apart.high, 3)}
    if apart.least > CLOCK_SKEW_S:
        action = f"synchronise the hosts' clocks (chrony, ntpd): signed tickets are refused beyond {CLOCK_SKEW_S} s"
        return error(check, found, action, **figures)
    if apart.least > NOTICEABLE_S:
        return warning(check, found, "synchronise the hosts' clocks (chrony, ntpd): they run apart", **figures)
    return ok(check, found, **figures)
