# SPDX-License-Identifier: Apache-2.0
"""Writes over Mooncake's TCP (and RDMA) transport.

Three things are special to it, and only this module knows them:

- What is in flight never overflows Mooncake's queue to a peer (`PeerQueue`).
- A waiting thread sleeps for most of the time that a batch takes (`Pace`).
- Bytes of a failed batch may still arrive.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vllm_ascend_pd.transport.batches import Batch, TransferLimits
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT, LEASE_EXPIRED, Reach, TransferError


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


# Decides how long a thread may sleep while Mooncake moves a batch over TCP.
#
# A thread that waits in Mooncake polls without a pause. That takes a core from the threads that move the bytes and from
# the model. A batch cannot arrive sooner than the link allows. So the thread sleeps until then, and polls afterwards.
# It also sleeps for a moment on batches of unknown or short time.

SHARE = 0.8
"""Part of the expected time that is slept. Below 1, so that a faster link shows within a few batches."""

EARLIEST_S = 0.0003
"""Seconds from a batch's start until it is polled for. Where cores are few, polling sooner delays the thread that
receives the batch: `benchmarks/ttft.py --models small --pairs 2/1 --prompts 128` takes a tenth longer without this."""

SHORTEST_S = 0.00005
"""Shorter sleeps are left out: the kernel wakes a thread 0.05 to 0.1 ms late."""

LONGEST_S = 1.0
"""Longer sleeps notice a failed peer too late."""

LEARNS_FROM = 1 << 20
"""Bytes. The time of smaller batches is not the link's alone. They only show that it is faster than expected, and only
if no other batch was in flight before them: a batch that arrives with another one seems to take no time."""

_LATEST = 8
_ENOUGH = 4


class Pace:
    """Estimates one peer's speed. Batches of several threads make the estimate worse, nothing else."""

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=_LATEST)
        # When the last batch ended: the next one had the link to itself only from then on.
        self._ended = -math.inf

    def pause_s(self, num_bytes: int, started: float) -> float:
        """Returns how long to sleep from now for a batch that has `started`: 0, or up to `LONGEST_S` seconds."""
        expected = self._seconds_for_a_byte() * num_bytes
        until = max(started + EARLIEST_S, max(started, self._ended) + SHARE * expected)
        pause_s = until - time.monotonic()
        return min(pause_s, LONGEST_S) if pause_s >= SHORTEST_S else 0.0

    def learn(self, num_bytes: int, started: float) -> None:
        """Records that a batch has just arrived. `num_bytes` is above 0."""
        now = time.monotonic()
        seconds = now - max(started, self._ended)
        taken = seconds / num_bytes
        alone = started >= self._ended
        # Of a batch that takes less, much of the time may be the sleep.
        is_long = num_bytes >= LEARNS_FROM and seconds >= 2 * EARLIEST_S
        if is_long or (alone and taken < self._seconds_for_a_byte()):
            self._seconds_per_byte.append(taken)
        self._ended = now

    def _seconds_for_a_byte(self) -> float:
        """Returns the expected seconds per byte; 0 while too little is known."""
        latest = sorted(self._seconds_per_byte)
        # One of the faster batches: polling for too long costs less than sleeping for too long.
        return latest[len(latest) // 4] if len(latest) >= _ENOUGH else 0.0


# Writing.


@dataclass
class _TcpPeer:
    # What of ours is in Mooncake's queue to the peer.
    queue: PeerQueue
    # How fast batches to the peer are.
    pace: Pace = field(default_factory=Pace)


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
        self._peers: dict[str, _TcpPeer] = {}

    def has_room(self, session: str, batch: Batch) -> bool:
        with self._lock:
            peer = self._peers.get(session)
        return peer is None or peer.queue.has_room(len(batch[2]))

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> _TcpFlight | None:
        """As `Writer.begin`. There is room while fewer than `BATCHES_IN_FLIGHT` batches to the peer are in flight."""
        self._reach.await_answer(session)
        peer, started, lengths = self._peer(session), time.monotonic(), batch[2]
        flight = _TcpFlight(self._mooncake, self._reach, peer, session, lengths, started)
        if not peer.queue.enter(len(lengths), self._limits.timeout_s):
            raise TransferError(
                session, f"earlier writes did not finish within {self._limits.timeout_s:g} s", retryable=True
            )
        try:
            if not may_begin():
                raise TransferError(session, LEASE_EXPIRED, retryable=False)
        except BaseException:
            peer.queue.leave(len(lengths), failed=False)
            raise
        try:
            flight.batch_id = int(self._mooncake.batch_transfer_async_write(session, *batch))
            if flight.batch_id != 0:
                return flight
            # Mooncake did not take it. Only this call makes it drop what it knows of a peer that has restarted.
            code = int(self._mooncake.batch_transfer_sync_write(session, *batch))
        except BaseException as error:  # noqa: BLE001 - `give_up` raises
            flight.give_up(error)
        flight.land(code)
        return None

    def forget(self, sessions: Collection[str]) -> None:
        with self._lock:
            for session in sessions:
                self._peers.pop(session, None)

    def _peer(self, session: str) -> _TcpPeer:
        with self._lock:
            if session not in self._peers:
                self._peers[session] = _TcpPeer(PeerQueue(self._capacity, self._limits.settle_s))
            return self._peers[session]


@dataclass(slots=True)
class _TcpFlight:
    mooncake: Any
    reach: Reach
    peer: _TcpPeer
    session: str
    lengths: list[int]
    started: float
    batch_id: int = 0

    def wait(self) -> None:
        """As `Flight.wait`. Sleeps first, because Mooncake polls without a pause."""
        try:
            num_bytes = sum(self.lengths)
            if pause_s := self.peer.pace.pause_s(num_bytes, self.started):
                time.sleep(pause_s)
            code = int(self.mooncake.get_batch_transfer_status([self.batch_id]))
            if code == 0:
                self.peer.pace.learn(num_bytes, self.started)
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
        self.peer.queue.leave(len(self.lengths), failed=False)

    def give_up(self, error: BaseException) -> NoReturn:
        """Ends the batch as failed, because `error` hides its end. Raises TransferError for an `Exception`, and others
        as they are."""
        lost = self.lost(repr(error), retryable=False)
        if isinstance(error, Exception):
            raise lost from error
        raise error

    def lost(self, answer: str, retryable: bool) -> TransferError:
        """Ends the batch as failed, and returns the error for it. Its bytes may still arrive."""
        self.peer.queue.leave(len(self.lengths), failed=True)
        self.reach.failed(self.session)
        return TransferError(
            self.session,
            f"a batch of {len(self.lengths)} descriptors, {sum(self.lengths)} bytes, ended after "
            f"{time.monotonic() - self.started:.1f} s with {answer}",
            retryable,
            may_arrive=True,
        )
