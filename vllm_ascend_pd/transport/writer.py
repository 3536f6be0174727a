# SPDX-License-Identifier: Apache-2.0
"""What puts batches on their way to peers: the interface of both writers, and how a write fails."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from vllm_ascend_pd.transport.batches import Batch


class TransferError(Exception):
    """A registration or a write failed. Bytes of a failed write may have arrived, entirely or in part.

    With `may_arrive` they may also still arrive, and sources may still be read: see `TransferLimits.settle_s`.
    """

    def __init__(self, session: str, reason: str, retryable: bool, may_arrive: bool = False) -> None:
        super().__init__(f"transfer to {session} failed: {reason}")
        self.session = session
        self.reason = reason
        self.may_arrive = may_arrive
        self.retryable = retryable
        """Whether the same write may succeed later. Mooncake answers most failures with a bare -1, so an
        address that the peer refuses counts as retryable too: bound the number of retries."""


class Flight(Protocol):
    """A batch on its way."""

    session: str

    def wait(self) -> None:
        """Returns when the receiver has every byte. Call it once. Raises `TransferError`."""


class Writer(Protocol):
    """Puts batches on their way. Any thread may call it."""

    def has_room(self, session: str, batch: Batch) -> bool:
        """Whether `begin` would not have to wait for other batches."""

    def begin(self, session: str, batch: Batch, may_begin: Callable[[], bool]) -> Flight | None:
        """Sends one batch on its way. Returns None if it has arrived already. Raises `TransferError`.

        Asks `may_begin()` after all waiting, right before the batch begins. False ends the write.
        """

    def forget(self, sessions: Collection[str]) -> None:
        """Drops what is known of sessions that are not written to again. Harmless if they are."""


NO_LEAVE = "the leave to write ended before the write did"
"""The reason of a write that `may_begin` has ended."""
