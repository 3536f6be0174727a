# SPDX-License-Identifier: Apache-2.0
"""One request's transfer as a prefill rank sees it: a ticket's state, and what the rank's threads share of it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm_ascend_pd.core.plan import Offsets
from vllm_ascend_pd.core.producer_ticket import ProducerTicket, RankKey
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.device.base import Event


@dataclass(eq=False)
class Transfer:
    """One ticket on one prefill rank. `state` decides; it is touched in `changing` alone, by three threads.

    The peer's sender alone writes for the transfer, and counts `num_bytes`. `finishing`: a Finish task is queued;
    `ended`: nothing reads the request's blocks any more; `released`: vLLM is done with the request.
    """

    request_id: str
    ticket: Ticket
    digest: str
    d_blocks: tuple[Offsets, ...]
    state: ProducerTicket
    num_bytes: int = 0
    bytes_at_end: int = 0
    computed: Event | None = None  # the end of the prompt's last layer
    finishing: bool = False
    ended: bool = False
    released: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def failure(self) -> str | None:
        return self.state.failure

    @property
    def settled_at(self) -> float:
        return self.state.settled_at

    def wrote(self, num_bytes: int) -> None:
        """Counts what has arrived, and how much of it before the last layer was computed."""
        self.num_bytes += num_bytes
        if self.computed is None or not self.computed.is_done():
            self.bytes_at_end = self.num_bytes

    @contextmanager
    def changing(self) -> Iterator[ProducerTicket]:
        """The state, locked. Whoever waits for an answer of it asks again afterwards."""
        with self._changed:
            yield self.state
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        with self.changing() as state:
            state.fail(reason)

    def unsettle(self, until: float) -> None:
        with self.changing() as state:
            state.unsettle(until)

    def holds(self, key: RankKey) -> bool:
        """May bytes for `key` leave now?"""
        with self._changed:
            return self.state.holds(key, time.monotonic())

    # On the sender's thread: these wait, at most until the grant deadline.

    def await_destinations(self) -> bool:
        """Is it known where to write?"""
        return self._await(self.state.known)

    def await_grant(self, key: RankKey) -> bool:
        """May this rank write to `key` now?"""
        return self._await(lambda now: self.state.may_write(key, now))

    def finish(self) -> bool:
        """No write will follow. Is everything written?"""
        return self._await(self.state.finish)

    def _await(self, question: Callable[[float], bool | None]) -> bool:
        with self._changed:
            while (answer := question(time.monotonic())) is None:
                self._changed.wait(max(0.0, self.state.grant_deadline - time.monotonic()))
            return answer
