# SPDX-License-Identifier: Apache-2.0
"""Keeps Mooncake's TCP queue to one peer from overflowing.

A descriptor that finds this queue full is refused, and with Mooncake 0.3.13 that may stop the queue for good:
`enqueuePooledTransfer` (`tcp_transport_lane_impl.h`) marks the queue's pump as scheduled, and then schedules it only if
nothing was refused. If the refused descriptor was the first one since the pump last ran, the pump never runs again.
Then every later write to this peer fails, as in https://github.com/kvcache-ai/Mooncake/issues/4209.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT


def most_descriptors(capacity: int) -> int:
    """Returns the most descriptors of a batch for a queue of `capacity`, half of which is for failed batches' rest."""
    return max(1, capacity // (2 * BATCHES_IN_FLIGHT))


class PeerQueue:
    """Counts what is in Mooncake's queue to one peer. Any thread may call it."""

    def __init__(self, capacity: int, settle_s: float) -> None:
        """`capacity`: descriptors. `settle_s`: for how many seconds those of a failed batch may stay in the queue."""
        self._capacity = capacity
        self._settle_s = settle_s
        self._changed = threading.Condition()
        self._batches = 0
        self._descriptors = 0
        # For each failed batch: until when its descriptors may stay, and how many.
        self._left: deque[tuple[float, int]] = deque()

    def enter(self, descriptors: int, timeout_s: float) -> bool:
        """Waits until there is room for a batch, and counts it. Returns False after `timeout_s` without room."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._has_room(descriptors):
                now = time.monotonic()
                if now >= deadline:
                    return False
                until = min(deadline, self._left[0][0]) if self._left else deadline
                self._changed.wait(max(0.0, until - now))
            self._batches += 1
            self._descriptors += descriptors
            return True

    def has_room(self, descriptors: int) -> bool:
        """Returns whether `enter` would not wait."""
        with self._changed:
            return self._has_room(descriptors)

    def leave(self, descriptors: int, *, failed: bool) -> None:
        """Ends a batch that `enter` counted. If it `failed`, its descriptors count for `settle_s` more seconds."""
        with self._changed:
            self._batches -= 1
            self._descriptors -= descriptors
            if failed:
                self._left.append((time.monotonic() + self._settle_s, descriptors))
            self._changed.notify_all()

    def _has_room(self, descriptors: int) -> bool:
        while self._left and self._left[0][0] <= time.monotonic():
            self._left.popleft()
        used = self._descriptors + sum(left for _, left in self._left)
        return self._batches < BATCHES_IN_FLIGHT and used + descriptors <= self._capacity
