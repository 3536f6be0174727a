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
class GrantWaitLimit:
    """It ends when others have waited for `others_s` seconds, but for no transfer before a date of its own. Without
    others it lasts for ever. All transfers of a sender share it, so that who is behind several of them waits for that
    long once: when it has ended, it stays so for the next ones, until one gets its grant after all.

    `others_wait()`: are there any? Asked from `others_s` before a transfer's date on, so that they have waited for long
    enough by then. Dates are of `time.monotonic`. The sender's thread's.
    """

    others_s: float = 0.0
    others_wait: Callable[[], bool] = _nobody_waits
    _waited_since: float = math.inf
    _looked_at: float = -math.inf

    def is_over(self, own_end: float, now: float) -> bool:
        """Asked while a transfer waits, at `next_look` at the latest."""
        if now < own_end - self.others_s:
            return False
        if now - self._looked_at > self.others_s:  # nobody was waited for meanwhile
            self._waited_since = math.inf
        self._looked_at = now
        self._waited_since = min(self._waited_since, now) if self.others_wait() else math.inf
        return now >= max(own_end, self._waited_since + self.others_s)

    def next_look(self, own_end: float, now: float) -> float:
        """When to ask `is_over` again."""
        first_look = own_end - self.others_s
        return first_look if now < first_look else now + _LOOK_S

    def rewarded(self) -> None:
        """What was waited for has come."""
        self._waited_since = math.inf
