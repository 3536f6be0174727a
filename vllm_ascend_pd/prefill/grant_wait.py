# SPDX-License-Identifier: Apache-2.0
"""How long a transfer without a grant may keep transfers waiting that have theirs, of the same sender.

The sender's thread owns the limit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

# How often to look whether others wait.
_LOOK_S = 0.2


def _nobody_waits() -> bool:
    return False


@dataclass
class GrantWaitLimit:
    """Ends when others have waited for `others_s` seconds, but for no transfer before a date of its own.

    Without others it never ends. All transfers of a sender share it, so a transfer behind several of them waits that
    long once: after its end it stays ended for the next ones, until one gets its grant. Dates are of `time.monotonic`.
    """

    # Seconds that others wait.
    others_s: float = 0.0
    # Whether others wait. Called from `others_s` before a transfer's date on: then they have waited long enough by it.
    others_wait: Callable[[], bool] = _nobody_waits
    # Since when others have been seen waiting.
    _waited_since: float = math.inf
    # When that was last looked at.
    _looked_at: float = -math.inf

    def is_over(self, own_end: float, now: float) -> bool:
        """Whether a transfer with this date has to give up. Called while it waits, at `next_look` at the latest."""
        if now < own_end - self.others_s:
            return False
        if now - self._looked_at > self.others_s:  # no transfer has waited meanwhile
            self._waited_since = math.inf
        self._looked_at = now
        self._waited_since = min(self._waited_since, now) if self.others_wait() else math.inf
        return now >= max(own_end, self._waited_since + self.others_s)

    def next_look(self, own_end: float, now: float) -> float:
        """Returns when to call `is_over` again."""
        first_look = own_end - self.others_s
        return first_look if now < first_look else now + _LOOK_S

    def rewarded(self) -> None:
        """A transfer has got the grant that it waited for."""
        self._waited_since = math.inf
