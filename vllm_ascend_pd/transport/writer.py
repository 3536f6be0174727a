# SPDX-License-Identifier: Apache-2.0
"""The interface of everything that writes to peers: `TcpWriter` and `AscendWriter`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from vllm_ascend_pd.transport.batches import Batch

BATCHES_IN_FLIGHT = 2
"""Batches that a sender keeps in flight: one is prepared while the other is on its way."""

NO_LEAVE = "the lease ended before the write did"
"""The reason of a write that `may_begin` has ended."""


class TransferError(Exception):
    """A registration or a write failed. Some or all bytes of a failed write may have arrived."""

    def __init__(self, session: str, reason: str, retryable: bool, may_arrive: bool = False) -> None:
        super().__init__(f"transfer to {session} failed: {reason}")
        # The peer's address, or this engine's if it failed by itself.
        self.session = session
        # What went wrong, without the address.
        self.reason = reason
        # Whether bytes may still arrive, and sources may still be read, for `TransferLimits.settle_s` more seconds.
        self.may_arrive = may_arrive
        # Whether the same write may succeed later. Mooncake answers most failures with a bare -1, so an address that
        # the peer refuses counts as retryable, too. Bound the number of retries.
        self.retryable = retryable


class Flight(Protocol):
    """A batch in flight."""

    # The peer's address.
    session: str

    def wait(self) -> None:
        """Block until the receiver has every byte. Call it exactly once, on any thread.

        After it has returned, the batch's source memory may change. After `TransferError` it may change, too, unless
        the error's `may_arrive` is set: then it must stay unchanged for `TransferLimits.settle_s` more seconds.
        """


class Writer(Protocol):
    """Writes batches to peers. Any thread may call any method at any time."""

    def has_room(self, session: str, batch: Batch) -> bool:
        """Return whether `begin` would start `batch` without waiting for batches in flight. Never blocks."""

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> Flight | None:
        """Start to write one batch. Return its `Flight`, or None if every byte has arrived already.

        `session`: the peer's `TransferEngine.session`. `batch`: cut to this engine's limits. Its lists may be reused
        after the return. Its source memory must stay unchanged until `Flight.wait` has returned.
        `may_begin`: called once after all waiting, right before the batch starts. If it returns False, nothing is
        written and `TransferError` is raised.

        Blocks until the peer answers a probe, if it is new or failed before, and until there is room for the batch:
        for `TransferLimits.timeout_s` each. Raises `TransferError` if either takes longer, or Mooncake refuses the
        batch.
        """

    def forget(self, sessions: Collection[str]) -> None:
        """Drop what is known of peers. Call it when no further write to them is expected. A later write is allowed."""
