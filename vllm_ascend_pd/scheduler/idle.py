# SPDX-License-Identifier: Apache-2.0
"""How long a step that computes nothing waits for transfers.

While requests wait for KV, vLLM steps without a pause: its scheduler asks again and again, and its processes poll each
other. On a busy host that takes cores from whoever computes. A step that waits for a transfer in the ranks ends as soon
as one does; what comes to the scheduler meanwhile, a new request, waits for the step. So the longer nothing has
happened, the longer the next step waits: at most as long again.
"""

import time

FIRST_S = 0.02
"""Short beside what a prompt takes to be computed, which is what is waited for."""


class IdleWait:
    def __init__(self, longest_s: float) -> None:
        """`longest_s`: seconds; 0 where other engines wait for every step of this one (data-parallel MoE)."""
        self._longest_s = longest_s
        self._since = time.monotonic()

    def next(self, computes: bool, news: bool) -> float:
        """Seconds, for a step that `computes` something or not, and has `news` for the ranks or not."""
        now = time.monotonic()
        if computes or news:
            self._since = now
        return 0.0 if computes else min(self._longest_s, max(FIRST_S, now - self._since))
