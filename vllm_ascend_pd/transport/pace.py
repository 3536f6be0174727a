# SPDX-License-Identifier: Apache-2.0
"""Decides how long a thread may sleep while Mooncake moves a batch over TCP.

A thread that waits in Mooncake polls without a pause. That takes a core from the threads that move the bytes and from
the model. A batch cannot arrive sooner than the link allows. So the thread sleeps until then, and polls afterwards. It
also sleeps for a moment on batches of unknown or short time.
"""

from __future__ import annotations

import math
import time
from collections import deque

SHARE = 0.8
"""Part of the expected time that is slept. Below 1, so that a faster link shows within a few batches."""

EARLIEST_S = 0.0003
"""Seconds from a batch's start until it is polled for. Where cores are few, polling sooner delays the thread that
receives the batch: `benchmarks/ttft.py --models small --pairs 2/1 --prompts 128` takes a tenth longer without this."""

SHORTEST_S = 0.00005
"""Shorter sleeps are left out: the kernel wakes a thread 0.05 to 0.1 ms late."""

LONGEST_S = 1.0
"""Longer sleeps notice a failed peer too late."""

LEARNS_FROM = 1 << 20
"""Bytes. The time of smaller batches is not the link's alone. They only show that it is faster than expected, and only
if no other batch was in flight before them: a batch that arrives with another one seems to take no time."""

_LATEST = 8
_ENOUGH = 4


class Pace:
    """Estimates one peer's speed. Batches of several threads make the estimate worse, nothing else."""

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=_LATEST)
        # When the last batch ended: the next one had the link to itself only from then on.
        self._ended = -math.inf

    def pause_s(self, num_bytes: int, started: float) -> float:
        """Returns how long to sleep from now for a batch that has `started`: 0, or up to `LONGEST_S` seconds."""
        expected = self._seconds_for_a_byte() * num_bytes
        until = max(started + EARLIEST_S, max(started, self._ended) + SHARE * expected)
        pause_s = until - time.monotonic()
        return min(pause_s, LONGEST_S) if pause_s >= SHORTEST_S else 0.0

    def arrived(self, num_bytes: int, started: float) -> None:
        """Records that a batch has just arrived."""
        now = time.monotonic()
        seconds = now - max(started, self._ended)
        taken = seconds / num_bytes
        alone = started >= self._ended
        # Of a batch that takes less, much of the time may be the sleep.
        is_long = num_bytes >= LEARNS_FROM and seconds >= 2 * EARLIEST_S
        if is_long or (alone and taken < self._seconds_for_a_byte()):
            self._seconds_per_byte.append(taken)
        self._ended = now

    def _seconds_for_a_byte(self) -> float:
        """Returns the expected seconds per byte; 0 while too little is known."""
        latest = sorted(self._seconds_per_byte)
        # One of the faster batches: polling for too long costs less than sleeping for too long.
        return latest[len(latest) // 4] if len(latest) >= _ENOUGH else 0.0
