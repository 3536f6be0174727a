# SPDX-License-Identifier: Apache-2.0
"""How long a step that computes nothing waits for transfers.

While requests wait for KV, vLLM steps without a pause: its scheduler asks again and again, and its processes poll each
other. On a busy host that takes cores from whoever computes. A step that waits for a transfer in the ranks ends as soon
as one does; what comes to the scheduler meanwhile, a new request, waits for the step. So the longer nothing has
happened, the longer the next step waits: at most as long again. Of the steps that vLLM has under way only one waits:
what it ends with is not held up by another one behind it, nor a new request by both; and where scheduler and rank share
a process, vLLM looks at a step's end only when it has run the next.

While ranks in processes of their own wait, the scheduler's polls them for as long after the last step's end as vLLM
says: 1 s unless it is told otherwise. A pause between two such steps lets that time pass asleep, and the ranks, which
have waited themselves, do not poll meanwhile. A transfer that ends in the pause ends it: the rank rings. Decode pauses;
prefill does not, where a new request is what matters.
"""

import time

from vllm_ascend_pd.transport.wakeup import WakeupSocket

FIRST_S = 0.02
"""Short beside what a prompt takes to be computed, which is what is waited for."""

PAUSE_S = 0.011
"""Longer than processes should poll each other for where several share a core (10 ms in the tests)."""


class IdleWait:
    def __init__(self, longest_s: float, in_flight: int, doorbell: WakeupSocket | None = None) -> None:
        """`longest_s`: seconds; 0 where other engines wait for every step of this one (data-parallel MoE). `in_flight`:
        as many steps as vLLM has under way at most; while one of them computes, none behind it waits: its next token's
        step would wait, too. `doorbell`: for ranks in processes of their own, which the scheduler's polls; without, it
        never pauses."""
        self._longest_s = longest_s
        self._in_flight = in_flight
        self._doorbell = doorbell
        self._empty = in_flight - 1  # steps since one computed; at first none is under way
        self._since = time.monotonic()

    @property
    def _waits(self) -> bool:
        """The last step does."""
        return self._longest_s > 0 and self._empty >= self._in_flight and self._empty % self._in_flight == 0

    @property
    def doorbell(self) -> str:
        """Where ranks ring when a transfer ends while no step waits for it; "": nowhere."""
        return "" if self._doorbell is None else self._doorbell.address

    def pause(self) -> None:
        """Before a step that computes nothing and has no news for the ranks: sleeps if the last one waited in them,
        unless one rings."""
        if self._doorbell is not None and self._waits:
            self._doorbell.wait(min(PAUSE_S, self._longest_s))

    def next(self, computes: bool, news: bool) -> float:
        """Seconds, for a step that `computes` something or not, and has `news` for the ranks or not."""
        if self._doorbell is not None:
            self._doorbell.silence()  # this step brings what it has rung for
        now = time.monotonic()
        if computes or news:
            self._since = now
        self._empty = 0 if computes else self._empty + 1
        return min(self._longest_s, max(FIRST_S, now - self._since)) if self._waits else 0.0

    def close(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
