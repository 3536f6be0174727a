# SPDX-License-Identifier: Apache-2.0
"""Limits how long a transfer without a grant may hold up transfers behind it in the same sender.

The sender's thread owns the limit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.core.threads import owned

# How often to look whether others wait.
_LOOK_S = 0.2


def _nobody_waits() -> bool:
    return False


@dataclass
class GrantWaitLimit:
    """Ends a transfer's wait for a grant when others have waited behind it for `others_s` seconds.

    Each transfer also has a time of its own, before which its wait never ends. If no others wait, it never ends either.

    All transfers of a sender share one limit. So a transfer behind several ungranted ones waits `others_s` only once:
    the limit stays over for the next ones, until one of them gets its grant. Times are of `time.monotonic`.
    """

    # Seconds that others wait at most.
    others_s: float = 0.0
    # Returns whether others wait. It is called from `others_s` seconds before a transfer's own time on.
    others_wait: Callable[[], bool] = _nobody_waits
    # Since when others have been seen waiting.
    _waited_since: float = math.inf
    # When `others_wait` was last called.
    _looked_at: float = -math.inf

    @owned
    def is_over(self, own_end: float, now: float) -> bool:
        """Whether a transfer has to give up. `own_end`: its own time. Call it again by `next_look` at the latest."""
        if now < own_end - self.others_s:
            return False
        if now - self._looked_at > self.others_s:  # no transfer has waited in between
            self._waited_since = math.inf
        self._looked_at = now
        self._waited_since = min(self._waited_since, now) if self.others_wait() else math.inf
        return now >= max(own_end, self._waited_since + self.others_s)

    @owned
    def next_look(self, own_end: float, now: float) -> float:
        """Returns when to call `is_over` again."""
        first_look = own_end - self.others_s
        return first_look if now < first_look else now + _LOOK_S

    @owned
    def rewarded(self) -> None:
        """Starts anew, because a transfer has got the grant that it waited for."""
        self._waited_since = math.inf
