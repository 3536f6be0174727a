# SPDX-License-Identifier: Apache-2.0
"""The staging ring: registered memory where regrouped KV waits to be sent. Each layer in flight has a slot.

Several threads share the ring: the side stream takes slots, and senders give them back. A lock guards its state.
"""

import threading
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from vllm_ascend_pd.core.prefill_ticket import RunningTime

H = TypeVar("H")

# How often, in seconds, to look whether a slot has rested for long enough.
LOOK_S = 0.5


@dataclass(frozen=True, eq=False)
class Slot:
    """A part of the ring's buffer."""

    index: int
    # Bytes from the start of the buffer.
    offset: int
    # In this process.
    address: int


class StagingRing(Generic[H]):
    """Hands out slots of one buffer to holders, and takes them back in any order. Any thread may call it.

    After a failed write a slot rests until nothing can read it any more.
    """

    def __init__(self, buffer: torch.Tensor, slot_bytes: int, slots: int, running_time: RunningTime) -> None:
        """`buffer`: uint8 `[n]`, with room for `slots` slots of `slot_bytes` bytes."""
        assert buffer.numel() >= slot_bytes * slots
        self.buffer = buffer
        self.slot_bytes = slot_bytes
        first = buffer.data_ptr()
        self._free = [Slot(n, n * slot_bytes, first + n * slot_bytes) for n in range(slots)]
        # The holder of each slot that is taken, by the slot's index.
        self._holders: dict[int, H] = {}
        # Slots that rest, and until when, in running time.
        self._resting: list[tuple[float, Slot]] = []
        self._running_time = running_time
        # Guards the three above. A condition's own methods are Python and slower, and every layer takes this lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def holders(self) -> list[H]:
        """The holders of the slots that are taken."""
        with self._lock:
            return list(self._holders.values())

    def take(self, holder: H) -> Slot | None:
        """Returns a slot, or None if none is free."""
        with self._lock:
            self.rests()
            if not self._free:
                return None
            slot = self._free.pop()
            self._holders[slot.index] = holder
            return slot

    def acquire(self, holder: H, timeout_s: float) -> Slot:
        """Waits for a free slot. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (slot := self.take(holder)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no staging slot became free in {timeout_s:g} s: the link does not keep up")
                self._changed.wait(min(left, LOOK_S) if self._resting else left)
        return slot

    def release(self, slot: Slot, settled_at: float = 0.0) -> None:
        """Takes a slot back. `settled_at`: the running time at which nothing reads it any more; 0 for now."""
        with self._lock:
            del self._holders[slot.index]  # KeyError: it was free
            if settled_at:
                self._resting.append((settled_at, slot))
                self.rests()
            else:
                self._free.append(slot)
            self._changed.notify()

    def rests(self) -> bool:
        """Returns whether a slot rests. Frees those that have rested long enough.

        While a slot rests, call this every `LOOK_S` seconds, because running time advances only when it is read.
        """
        if not self._resting:
            return False
        with self._lock:
            now = self._running_time()
            self._free += [slot for until, slot in self._resting if until <= now]
            self._resting = [(until, slot) for until, slot in self._resting if until > now]
            return bool(self._resting)
