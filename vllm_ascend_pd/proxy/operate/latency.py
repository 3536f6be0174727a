# SPDX-License-Identifier: Apache-2.0
"""Percentiles of recent durations, computed from the samples and not from a histogram's buckets."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from vllm_ascend_pd.core.threads import owned

MAX_SAMPLES = 2000
WINDOW_SECONDS = 600.0


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in seconds; None without samples."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class RecentSamples:
    """The samples of the last `WINDOW_SECONDS`, at most `MAX_SAMPLES`. The event loop's thread owns it."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    @owned
    def add(self, seconds: float, now: float) -> None:
        """`now`: on the monotonic clock that `percentiles` gets, too."""
        self._samples.append((now, seconds))

    @owned
    def percentiles(self, now: float) -> Percentiles:
        while self._samples and now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()
        return percentiles([seconds for _, seconds in self._samples])


def percentiles(samples: list[float]) -> Percentiles:
    """By nearest rank: the smallest sample that is at least as large as so many percent of the samples."""
    if not samples:
        return Percentiles(0)
    ranked = sorted(samples)
    return Percentiles(len(ranked), *(ranked[math.ceil(len(ranked) * part / 100) - 1] for part in (50, 90, 99)))
