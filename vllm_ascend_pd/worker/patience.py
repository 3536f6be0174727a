# SPDX-License-Identifier: Apache-2.0
"""How long a transfer without a grant may keep others waiting, of the same sender, that have theirs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

# How often it is looked whether others wait.
_LOOK_S = 0.2


def _nobody_waits() -> bool:
    return False


@dataclass
class Patience:
    """It ends when others have waited for `others_s` seconds, but not before `ends_at`. Without others it lasts for
    ever.

    `others_wait()`: are there any? Asked from `others_s` before `ends_at` on, so that they have waited for long enough
    by then. Dates are of `time.monotonic`. One thread's.
    """

    ends_at: float = math.inf
    others_s: float = 0.0
    others_wait: Callable[[], bool] = _nobody_waits
    _waited_since: float = math.inf

    def is_over(self, now: float) -> bool:
        """Asked while the transfer waits, at `next_look` at the latest."""
        if now < self._first_look:
            return False
        self._waited_since = min(self._waited_since, now) if self.others_wait() else math.inf
        return now >= max(self.ends_at, self._waited_since + self.others_s)

    def next_look(self, now: float) -> float:
        """When to ask `is_over` again."""
        return self._first_look if now < self._first_look else now + _LOOK_S

    @property
    def _first_look(self) -> float:
        return self.ends_at - self.others_s
