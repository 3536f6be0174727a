# SPDX-License-Identifier: Apache-2.0
"""Events in the order of their times; of equal times in the order they were made."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._made = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        self._made += 1
        heapq.heappush(self._heap, (max(time, self.now), self._made, action, args))

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, action, *args)

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            self.now, _, action, args = heapq.heappop(heap)
            self.events += 1
            action(*args)


class Level:
    """A number that changes: its mean over time and its maximum, since `reset`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.value = 0.0
        self.maximum = 0.0
        self._area = 0.0
        self._from = self._at = clock.now

    def add(self, change: float) -> None:
        now = self._clock.now
        self._area += self.value * (now - self._at)
        self._at = now
        self.value += change
        self.maximum = max(self.maximum, self.value)

    def reset(self) -> None:
        self._area, self.maximum = 0.0, self.value
        self._from = self._at = self._clock.now

    @property
    def mean(self) -> float:
        now = self._clock.now
        area = self._area + self.value * (now - self._at)
        return area / (now - self._from) if now > self._from else 0.0
