# SPDX-License-Identifier: Apache-2.0
"""One request's transfer as a prefill rank sees it: a ticket, the decode ranks it writes to, and their grants."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_ascend_pd.core.plan import Offsets
from vllm_ascend_pd.core.protocol import RankDescription
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.device.base import Event

RankKey = tuple[int, int]  # (pp_rank, tp_rank)


@dataclass
class Destination:
    """A decode rank. `covers`: indices of its tensors that this rank fills; `until`: when the lease ends on this
    side's clock, counted from the request's departure, so never later than on the other side; `told`: it knows
    how the transfer ended."""

    rank: RankDescription
    covers: tuple[int, ...]
    granted: bool = False
    until: float = 0.0
    lease_s: float = 0.0
    asked_at: float = 0.0
    asking: bool = False
    told: bool = False


@dataclass(eq=False)
class Transfer:
    """State of one ticket on one prefill rank.

    `failure` is set once and never cleared: from then on nothing more is written (R1, R2). The peer's sender
    alone writes for the transfer, and counts `num_bytes`. Bytes of a failed write may leave and arrive until
    `settled_at`.

    Its life: `contacted` (the decode engine is known, or will not be), pushes, `finishing` (a Finish task is
    queued), `finished` (no write can follow), `reporting` (decode is being told), `reported` (it knows, or cannot
    be reached). `released`: vLLM is done with the request.
    """

    request_id: str
    ticket: Ticket
    digest: str
    d_blocks: tuple[Offsets, ...]
    grant_deadline: float
    failure: str | None = None
    settled_at: float = 0.0
    num_bytes: int = 0
    bytes_at_end: int = 0
    computed: Event | None = None  # the end of the prompt's last layer
    destinations: dict[RankKey, Destination] | None = None
    contacted: bool = False
    finishing: bool = False
    finished: bool = False
    reporting: bool = False
    reported: bool = False
    released: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def wrote(self, num_bytes: int) -> None:
        """Counts what has arrived, and how much of it before the last layer was computed."""
        self.num_bytes += num_bytes
        if self.computed is None or not self.computed.is_done():
            self.bytes_at_end = self.num_bytes

    def fail(self, reason: str) -> None:
        """Records the first reason. Has no effect on a transfer that has already finished."""
        with self._changed:
            if self.failure is None and not self.finished:
                self.failure = reason
            self._changed.notify_all()

    def unsettle(self, until: float) -> None:
        """A write was given up: what is on its way arrives by `until`."""
        with self._changed:
            self.settled_at = max(self.settled_at, until)

    def set_destinations(self, destinations: dict[RankKey, Destination]) -> None:
        with self._changed:
            self.destinations = destinations
            self._changed.notify_all()

    def granted(self, key: RankKey, until: float) -> None:
        with self._changed:
            assert self.destinations is not None
            destination = self.destinations[key]
            destination.granted = True
            destination.until = max(destination.until, until)
            self._changed.notify_all()

    def await_destinations(self) -> bool:
        """Waits until it is known where to write, at most until the grant deadline; False if never."""
        with self._changed:
            self._await(lambda: self.destinations is not None)
            if self.failure is None and self.destinations is None:
                self.failure = "the decode engine did not describe itself in time"
            return self.failure is None

    def await_grant(self, key: RankKey) -> bool:
        """May this rank write to `key` now? Waits for the grant, at most until the grant deadline."""
        with self._changed:
            self._await(lambda: self._destination(key).granted)
            destination = self._destination(key)
            if self.failure is None and not destination.granted:
                self.failure = f"decode rank {key} gave no grant in time"
            elif self.failure is None and time.monotonic() >= destination.until:
                self.failure = f"the lease for decode rank {key} ran out"
            return self.failure is None

    def await_all_grants(self) -> None:
        """Leaves the transfer failed unless it may write to all its destinations now."""
        if self.await_destinations():
            assert self.destinations is not None
            for key in self.destinations:
                self.await_grant(key)

    def finish(self) -> None:
        """No write will follow."""
        with self._changed:
            self.finished = True

    def _await(self, condition: Callable[[], bool]) -> None:
        timeout_s = max(0.0, self.grant_deadline - time.monotonic())
        self._changed.wait_for(lambda: self.failure is not None or condition(), timeout_s)

    def _destination(self, key: RankKey) -> Destination:
        assert self.destinations is not None
        return self.destinations[key]
