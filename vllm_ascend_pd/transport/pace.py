# SPDX-License-Identifier: Apache-2.0
"""How long a thread may sleep while Mooncake moves a batch over TCP.

Who waits in Mooncake's calls polls without a pause, which takes a core from the threads that move the bytes, and from
the model. But a batch is not done sooner than the link allows: until then the thread sleeps, and only then it polls.
"""

from __future__ import annotations

import math
import time
from collections import deque

SHARE = 0.8
"""Of what the batch will probably take. Below 1: a link that has become faster shows within a few batches."""

SHORTEST_S = 0.0005
"""Sleeping for less costs more than polling: the kernel wakes the thread 0.05 to 0.1 ms late."""

LONGEST_S = 1.0
"""Who fails meanwhile is noticed that much later."""

LEARNS_FROM = 1 << 20
"""Bytes: what smaller batches take is not the link's time alone. So they tell only that it is faster than thought, and
that only where none was under way before them: what has arrived with another one seems to have taken no time."""

_LATEST = 8
_ENOUGH = 4


class Pace:
    """Of one peer. Batches of several threads only make it guess worse."""

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=_LATEST)
        self._ended = -math.inf
        """When the last batch did: the next one had the link to itself only from then on."""

    def pause_s(self, num_bytes: int, started: float) -> float:
        """How long a batch that has `started` can be slept on from now, `LONGEST_S` at most; 0: not at all."""
        expected = self._seconds_for_a_byte() * num_bytes
        pause_s = max(started, self._ended) + SHARE * expected - time.monotonic()
        return min(pause_s, LONGEST_S) if pause_s >= SHORTEST_S else 0.0

    def arrived(self, num_bytes: int, started: float) -> None:
        """A batch has, just now."""
        now = time.monotonic()
        taken = (now - max(started, self._ended)) / num_bytes
        alone = started >= self._ended
        if num_bytes >= LEARNS_FROM or (alone and taken < self._seconds_for_a_byte()):
            self._seconds_per_byte.append(taken)
        self._ended = now

    def _seconds_for_a_byte(self) -> float:
        """Probably; 0 while too little is known."""
        latest = sorted(self._seconds_per_byte)
        # Of the faster ones: to poll for too long costs less than to sleep for too long.
        return latest[len(latest) // 4] if len(latest) >= _ENOUGH else 0.0
