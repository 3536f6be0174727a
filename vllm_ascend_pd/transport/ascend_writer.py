# SPDX-License-Identifier: Apache-2.0
"""Writes over Mooncake's protocol `ascend`. A batch waits for a slot before it asks for its lease.

Facts, from the sources of Mooncake 0.3.11.post1 and 0.3.13:

- `batch_transfer_async_write` returns 0 (or -1 as an unsigned number) for a batch that it did not take.
- `transfer_check_status` does not wait. It says 1 or -1 once the task is over, else 0. It looks at the first descriptor
  only, but a task marks all of them together, after its last attempt. If the batch has no other descriptor, this answer
  frees it, and no call may name it again.
- `get_batch_transfer_status` frees a batch of several descriptors. It may say that a batch older than
  `MC_TRANSFER_TIMEOUT` failed though it arrived.
- A task that fails has aborted its stream and closed its channel (CANN's HIXL does this before it returns an error).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_ascend_pd.transport.batches import Batch, TransferLimits
from vllm_ascend_pd.transport.writer import LEASE_EXPIRED, Reach, TransferError

logger = logging.getLogger(__name__)

_NOT_TAKEN = (0, 2**64 - 1)
_ARRIVED, _FAILED = 1, -1

_SHORTEST_PAUSE_S = 0.000001
"""Linux makes 50 us and a little of it (PR_SET_TIMERSLACK, prctl(2))."""
_LONGEST_PAUSE_S = 0.005
_PAUSE_SHARE = 1 / 24
"""A pause between two polls, as a share of the time since the batch began: the end is noticed at most that late."""


def poll_pause_s(taken_s: float) -> float:
    """Returns how long to wait until the next look at a batch that has taken `taken_s` so far. So its end is noticed
    within 5% of its time, or within the shortest pause. A batch of 10 ms is looked at about 75 times."""
    return min(max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * taken_s), _LONGEST_PAUSE_S)


class AscendWriter:
    """A `Writer`. No batch queues inside Mooncake, and no byte of a failed batch arrives later, unless a call of
    Mooncake has raised an exception.

    A batch takes `limits.settle_s` at most, whatever the peer does: Mooncake tries twice, with timeouts.
    """

    def __init__(
        self, mooncake: Any, reach: Reach, limits: TransferLimits, slots: Slots, losses: Losses | None = None
    ) -> None:
        """`mooncake`: Mooncake's engine. `slots`: at most as many as its pool has threads. `losses`: is told how
        batches end; None: this engine's links heal."""
        self._mooncake = mooncake
        self._reach = reach
        self._limits = limits
        self._slots = slots
        self._losses = losses

    def has_room(self, session: str, batch: Batch) -> bool:
        return self._slots.is_free(session)

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> _AscendFlight:
        """As `Writer.begin`. Waits up to `limits.timeout_s` for a slot."""
        self._reach.await_answer(session)
        flight = _AscendFlight(self, session, batch[2])
        if not self._slots.take(session, self._limits.timeout_s):
            raise TransferError(
                session,
                f"no batch in flight ended within {self._limits.timeout_s:g} s to make room: this or other peers hang",
                retryable=True,
            )
        try:
            if not may_begin():
                raise TransferError(session, LEASE_EXPIRED, retryable=False)
        except BaseException:
            self._slots.give_back(session)
            raise
        try:
            flight.started = time.monotonic()
            flight.batch_id = int(self._mooncake.batch_transfer_async_write(session, *batch))
        except BaseException as error:  # noqa: BLE001 - `give_up` raises
            flight.give_up(error)
        if flight.batch_id in _NOT_TAKEN:
            raise flight.lost("Mooncake did not take it: it cannot read the peer's metadata")
        return flight

    def forget(self, sessions: Collection[str]) -> None:
        self._slots.forget(sessions)


@dataclass(slots=True)
class _AscendFlight:
    writer: AscendWriter
    session: str
    lengths: list[int]
    started: float = 0.0
    batch_id: int = 0

    def wait(self) -> None:
        """As `Flight.wait`."""
        try:
            arrived = self._await_end()
        except BaseException as error:  # noqa: BLE001 - `give_up` raises
            self.give_up(error)
        if not arrived:
            if self.writer._losses is not None:
                self.writer._losses.failed(self.session, time.monotonic())
            raise self.lost("the peer is gone, hangs or refuses the addresses: Mooncake's log says which")
        if self.writer._losses is not None:
            self.writer._losses.arrived()
        self.writer._slots.give_back(self.session, proved=True)

    def _await_end(self) -> bool:
        """Polls until Mooncake's task is over. Returns whether every byte has arrived."""
        mooncake, overdue_s = self.writer._mooncake, self.writer._limits.settle_s
        while (status := mooncake.transfer_check_status(self.batch_id)) not in (_ARRIVED, _FAILED):
            taken_s = time.monotonic() - self.started
            if taken_s > overdue_s:
                logger.error(
                    "a batch to %s has been in flight for %.0f s: CANN or Mooncake is stuck", self.session, taken_s
                )
                overdue_s *= 2
            time.sleep(poll_pause_s(taken_s))
        arrived: bool = status == _ARRIVED
        if len(self.lengths) > 1:
            arrived = mooncake.get_batch_transfer_status([self.batch_id]) == 0 and arrived
        return arrived

    def lost(self, why: str) -> TransferError:
        """Ends the batch as failed, and returns the error for it. No byte of it is in flight."""
        self.writer._slots.forget([self.session])
        self.writer._slots.give_back(self.session)
        self.writer._reach.failed(self.session)
        return TransferError(
            self.session,
            f"a batch of {len(self.lengths)} descriptors, {sum(self.lengths)} bytes, failed after "
            f"{time.monotonic() - self.started:.1f} s: {why}",
            retryable=True,
        )

    def give_up(self, error: BaseException) -> NoReturn:
        """Ends the batch as failed, because `error` hides its end. Its slot is kept for as long as a batch can take.
        Raises TransferError for an `Exception`, and others as they are."""
        self.writer._slots.forget([self.session])
        self.writer._slots.give_back_after(self.session, self.writer._limits.settle_s)
        self.writer._reach.failed(self.session)
        if isinstance(error, Exception):
            raise TransferError(self.session, repr(error), retryable=False, may_arrive=True) from error
        raise error


class Losses:
    """Notices that HIXL's comm engine has lost its links for good ("AICPU launch failed" in plog; vllm-ascend, issue
    13934). No error says so: peers answer probes, and no batch arrives at any. Any thread may call it."""

    # Batches to so many peers fail one after the other, for longer than a link takes to repair itself.
    BATCHES, PEERS, SECONDS = 8, 2, 120.0

    def __init__(self) -> None:
        # Why the engine must be restarted; None while batches arrive.
        self.failure: str | None = None
        self._lock = threading.Lock()
        # The three below change under the lock: since the last batch that has arrived.
        self._batches = 0
        self._peers: set[str] = set()
        self._since: float | None = None

    def arrived(self) -> None:
        """A batch has arrived."""
        if self._batches:
            with self._lock:
                self._batches, self._since, self.failure = 0, None, None
                self._peers.clear()

    def failed(self, session: str, now: float) -> None:
        """A batch has failed at a peer that had answered a probe. `now`: seconds of `time.monotonic`."""
        with self._lock:
            self._batches += 1
            self._peers.add(session)
            self._since = now if self._since is None else self._since
            lasts_s = now - self._since
            is_lost = self._batches >= self.BATCHES and len(self._peers) >= self.PEERS and lasts_s >= self.SECONDS
            if is_lost and self.failure is None:
                self.failure = (
                    f"no write has arrived for {lasts_s:.0f} s, and {len(self._peers)} peers answer: links of this "
                    "engine do not heal if plog says 'AICPU launch failed'"
                )
                logger.error("Restart this engine: %s", self.failure)


class Slots:
    """A slot for each batch in flight, and one batch to a peer at a time: CANN sends a peer's batches one by one.

    There are as many as Mooncake's pool has threads. The pool's queue has no bound and no deadline, and a batch in it
    cannot be cancelled: it could arrive long after its lease. So batches wait here, before they ask for their lease.

    A peer is unproven until a batch has arrived there, and again after one has failed. Batches to unproven peers share
    a part of the slots, so peers that hang leave slots for peers that do not. Any thread may call it.
    """

    def __init__(self, size: int, for_unproven: int) -> None:
        """`for_unproven`: how many of the `size` slots batches to unproven peers may take together."""
        self._size = size
        self._for_unproven = for_unproven
        # Guards the three below. A condition's own methods are Python and slower, and every batch takes this lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Sessions with a batch in flight, and whether the peer was proven when it began.
        self._held: dict[str, bool] = {}
        # Those of them whose batch is in flight for an unknown time: until when at most.
        self._until: dict[str, float] = {}
        # Sessions of proven peers.
        self._proven: set[str] = set()

    def take(self, session: str, timeout_s: float) -> bool:
        """Waits for a slot. Returns False if there is none within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self.is_free(session):
                now = time.monotonic()
                if now >= deadline:
                    return False
                self._changed.wait(max(0.0, min([deadline, *self._until.values()]) - now))
            self._held[session] = session in self._proven
            return True

    def is_free(self, session: str) -> bool:
        """Returns whether `take` would not wait."""
        with self._lock:
            if self._until:
                now = time.monotonic()
                for over in [each for each, until in self._until.items() if until <= now]:
                    del self._until[over], self._held[over]
            if session in self._held or len(self._held) >= self._size:
                return False
            return session in self._proven or sum(not proven for proven in self._held.values()) < self._for_unproven

    def give_back(self, session: str, proved: bool = False) -> None:
        """Frees the slot of a batch that is no longer in flight. `proved`: it has arrived."""
        with self._lock:
            if proved:
                self._proven.add(session)
            del self._held[session]
            self._changed.notify_all()

    def give_back_after(self, session: str, seconds: float) -> None:
        """Frees the slot of a batch whose end is unknown, `seconds` from now."""
        with self._lock:
            self._until[session] = time.monotonic() + seconds
            self._changed.notify_all()

    def forget(self, sessions: Collection[str]) -> None:
        """As `Writer.forget`, and for the peer of a batch that has failed."""
        with self._lock:
            self._proven.difference_update(sessions)
