# SPDX-License-Identifier: Apache-2.0
"""Writes over Mooncake's TCP (and RDMA) transport.

Three things are special to it, and only this module deals with them:

- What is in flight never overflows Mooncake's queue to a peer (`PeerQueue`).
- A waiting thread sleeps before it asks about a batch (`PAUSE_S`).
- Bytes of a failed batch may still arrive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_ascend_pd.transport.batches import Batch, TransferLimits
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT, LEASE_EXPIRED, Reach, TransferError

PAUSE_S = 0.0003
"""Seconds from a batch's start until Mooncake is asked about it, since Mooncake polls without a pause. Where cores are
few, asking sooner delays the thread that receives the batch: `benchmarks/ttft.py --models small --pairs 2/1 --prompts
128` takes a tenth longer without this."""


class PeerQueue:
    """Counts what is in Mooncake's queue to one peer, which must not overflow. Any thread may call it.

    A descriptor that finds this queue full is refused, and with Mooncake 0.3.13 that may stop the queue for good:
    `enqueuePooledTransfer` (`tcp_transport_lane_impl.h`) marks the queue's pump as scheduled, and then schedules it
    only if nothing was refused. If the refused descriptor was the first one since the pump last ran, the pump never
    runs again. Then every later write to this peer fails, as in https://github.com/kvcache-ai/Mooncake/issues/4209.
    """

    def __init__(self, capacity: int, settle_s: float) -> None:
        """`capacity`: descriptors. `settle_s`: for how many seconds those of a failed batch may stay in the queue."""
        self._capacity = capacity
        self._settle_s = settle_s
        self._changed = threading.Condition()
        self._batches = 0
        self._descriptors = 0
        # For each failed batch: until when its descriptors may stay, and how many.
        self._left: deque[tuple[float, int]] = deque()

    def enter(self, descriptors: int, timeout_s: float) -> bool:
        """Waits until there is room for a batch, and counts it. Returns False after `timeout_s` without room."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self.has_room(descriptors):
                now = time.monotonic()
                if now >= deadline:
                    return False
                until = min(deadline, self._left[0][0]) if self._left else deadline
                self._changed.wait(max(0.0, until - now))
            self._batches += 1
            self._descriptors += descriptors
            return True

    def has_room(self, descriptors: int) -> bool:
        """Returns whether `enter` would not wait."""
        with self._changed:
            while self._left and self._left[0][0] <= time.monotonic():
                self._left.popleft()
            used = self._descriptors + sum(left for _, left in self._left)
            return self._batches < BATCHES_IN_FLIGHT and used + descriptors <= self._capacity

    def leave(self, descriptors: int, *, failed: bool) -> None:
        """Ends a batch that `enter` counted. If it `failed`, its descriptors count for `settle_s` more seconds."""
        with self._changed:
            self._batches -= 1
            self._descriptors -= descriptors
            if failed:
                self._left.append((time.monotonic() + self._settle_s, descriptors))
            self._changed.notify_all()


class TcpWriter:
    """A `Writer`. A batch to a peer that hangs fails after `limits.timeout_s`, or when `MC_TRANSFER_TIMEOUT` is over.

    Bytes of a failed batch may still arrive for `limits.settle_s`, because Mooncake does not cancel them.
    """

    def __init__(self, mooncake: Any, reach: Reach, limits: TransferLimits, capacity: int) -> None:
        """`mooncake`: Mooncake's engine. `capacity`: descriptors that its queue to one peer takes."""
        self._mooncake = mooncake
        self._reach = reach
        self._limits = limits
        self._capacity = capacity
        self._lock = threading.Lock()
        # By session. Changes under the lock.
        self._queues: dict[str, PeerQueue] = {}

    def has_room(self, session: str, batch: Batch) -> bool:
        with self._lock:
            queue = self._queues.get(session)
        return queue is None or queue.has_room(len(batch[2]))

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> _TcpFlight | None:
        """As `Writer.begin`. There is room while fewer than `BATCHES_IN_FLIGHT` batches to the peer are in flight."""
        self._reach.await_answer(session)
        queue, started, lengths = self._queue(session), time.monotonic(), batch[2]
        flight = _TcpFlight(self._mooncake, self._reach, queue, session, lengths, started)
        if not queue.enter(len(lengths), self._limits.timeout_s):
            raise TransferError(
                session, f"earlier writes did not finish within {self._limits.timeout_s:g} s", retryable=True
            )
        try:
            if not may_begin():
                raise TransferError(session, LEASE_EXPIRED, retryable=False)
        except BaseException:
            queue.leave(len(lengths), failed=False)
            raise
        try:
            flight.batch_id = int(self._mooncake.batch_transfer_async_write(session, *batch))
            if flight.batch_id != 0:
                return flight
            # Mooncake did not take it, which may have taken a while. Only the other call makes it drop what it knows of
            # a peer that has restarted.
            has_begun = may_begin()
            code = int(self._mooncake.batch_transfer_sync_write(session, *batch)) if has_begun else 0
        except BaseException as error:  # noqa: BLE001 - `give_up` raises
            flight.give_up(error)
        flight.land(code)
        if not has_begun:
            raise TransferError(session, LEASE_EXPIRED, retryable=False)
        return None

    def forget(self, sessions: Collection[str]) -> None:
        with self._lock:
            for session in sessions:
                self._queues.pop(session, None)

    def _queue(self, session: str) -> PeerQueue:
        with self._lock:
            if session not in self._queues:
                self._queues[session] = PeerQueue(self._capacity, self._limits.settle_s)
            return self._queues[session]


@dataclass(slots=True)
class _TcpFlight:
    mooncake: Any
    reach: Reach
    queue: PeerQueue
    session: str
    lengths: list[int]
    started: float
    batch_id: int = 0

    def wait(self) -> None:
        """As `Flight.wait`. Sleeps first, because Mooncake polls without a pause."""
        try:
            time.sleep(max(0.0, self.started + PAUSE_S - time.monotonic()))
            code = int(self.mooncake.get_batch_transfer_status([self.batch_id]))
        except BaseException as error:  # noqa: BLE001 - `give_up` raises
            self.give_up(error)
        self.land(code)

    def land(self, code: int) -> None:
        """Ends the batch with Mooncake's `code`. Raises TransferError unless it is 0."""
        if code != 0:
            raise self.lost(
                f"{code} (the peer is gone, hangs or refuses the addresses: Mooncake's log on standard error says "
                "which)",
                retryable=True,
            )
        self.queue.leave(len(self.lengths), failed=False)

    def give_up(self, error: BaseException) -> NoReturn:
        """Ends the batch as failed, because `error` hides its end. Raises TransferError for an `Exception`, and others
        as they are."""
        lost = self.lost(repr(error), retryable=False)
        if isinstance(error, Exception):
            raise lost from error
        raise error

    def lost(self, answer: str, retryable: bool) -> TransferError:
        """Ends the batch as failed, and returns the error for it. Its bytes may still arrive."""
        self.queue.leave(len(self.lengths), failed=True)
        self.reach.failed(self.session)
        return TransferError(
            self.session,
            f"a batch of {len(self.lengths)} descriptors, {sum(self.lengths)} bytes, ended after "
            f"{time.monotonic() - self.started:.1f} s with {answer}",
            retryable,
            may_arrive=True,
        )
