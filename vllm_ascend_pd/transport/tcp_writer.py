# SPDX-License-Identifier: Apache-2.0
"""Writes over Mooncake's TCP (and RDMA) transport.

Three things are special to it, and only this module knows them: what is in flight never overflows Mooncake's queue to a
peer (`peer_queue.py`); a waiting thread sleeps for most of the time that a batch takes (`pace.py`); bytes of a failed
batch may still arrive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.transport.batches import Batch
from vllm_ascend_pd.transport.limits import TransferLimits
from vllm_ascend_pd.transport.pace import Pace
from vllm_ascend_pd.transport.peer_queue import PeerQueue
from vllm_ascend_pd.transport.reach import Reach
from vllm_ascend_pd.transport.writer import NO_LEAVE, TransferError


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
        if not peer.queue.enter(len(lengths), self._limits.timeout_s):
            raise TransferError(
                session, f"earlier writes did not finish within {self._limits.timeout_s:g} s", retryable=True
            )
        try:
            if not may_begin():
                raise TransferError(session, NO_LEAVE, retryable=False)
        except BaseException:
            peer.queue.leave(len(lengths), failed=False)
            raise
        flight = _TcpFlight(self._mooncake, self._reach, peer, session, lengths, started)
        try:
            flight.batch_id = int(self._mooncake.batch_transfer_async_write(session, *batch))
            if flight.batch_id != 0:
                return flight
            # Mooncake did not take it. Only this call makes it drop what it knows of a peer that has restarted.
            code = int(self._mooncake.batch_transfer_sync_write(session, *batch))
        except Exception as error:
            raise flight.lost(repr(error), retryable=False) from error
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
        num_bytes = sum(self.lengths)
        if pause_s := self.peer.pace.pause_s(num_bytes, self.started):
            time.sleep(pause_s)
        try:
            code = int(self.mooncake.get_batch_transfer_status([self.batch_id]))
        except Exception as error:
            raise self.lost(repr(error), retryable=False) from error
        if code == 0:
            self.peer.pace.arrived(num_bytes, self.started)
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
