# SPDX-License-Identifier: Apache-2.0
"""Limits the batches in flight over Mooncake's protocol `ascend` to the threads of its pool.

The pool's queue has no bound and no deadline, and a batch in it cannot be cancelled. A batch that waited there could
arrive long after its lease. So batches wait here, before they ask for their lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection


class Slots:
    """A slot for each batch in flight, and one batch to a peer at a time: CANN sends a peer's batches one by one.

    A peer is unproven until a batch has arrived there, and again after one has failed. Batches to unproven peers share
    a part of the slots, so peers that hang leave slots for peers that do not. Any thread may call it.
    """

    def __init__(self, size: int, for_unproven: int) -> None:
        """`for_unproven`: how many of the `size` slots batches to unproven peers may take together."""
        self._size = size
        self._for_unproven = for_unproven
        self._changed = threading.Condition()
        # The two below change under the condition.
        # Sessions with a batch in flight, and whether the peer was proven when it began.
        self._held: dict[str, bool] = {}
        # Sessions of proven peers.
        self._proven: set[str] = set()

    def take(self, session: str, timeout_s: float) -> bool:
        """Waits for a slot. Returns False if there is none within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._is_free(session):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            self._held[session] = session in self._proven
            return True

    def is_free(self, session: str) -> bool:
        """Returns whether `take` would not wait."""
        with self._changed:
            return self._is_free(session)

    def give_back(self, session: str) -> None:
        """Frees the slot of a batch that is no longer in flight."""
        with self._changed:
            del self._held[session]
            self._changed.notify_all()

    def proved(self, session: str, well: bool) -> None:
        """Records that a batch has arrived (`well`) or failed."""
        with self._changed:
            (self._proven.add if well else self._proven.discard)(session)

    def forget(self, sessions: Collection[str]) -> None:
        """As `Writer.forget`."""
        with self._changed:
            self._proven.difference_update(sessions)

    def _is_free(self, session: str) -> bool:
        if session in self._held or len(self._held) >= self._size:
            return False
        return session in self._proven or sum(not proven for proven in self._held.values()) < self._for_unproven
