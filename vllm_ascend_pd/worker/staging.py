# SPDX-License-Identifier: Apache-2.0
"""The staging ring: registered memory where regrouped KV waits to be sent, a slot per layer in flight."""

import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

H = TypeVar("H")


@dataclass(frozen=True)
class Slot:
    """`offset` bytes into the ring's buffer, at `address`."""

    index: int
    offset: int
    address: int


class StagingRing(Generic[H]):
    """`slots` slots of `slot_bytes` each in `buffer`, handed out to holders and taken back in any order."""

    def __init__(self, buffer: torch.Tensor, slot_bytes: int, slots: int) -> None:
        assert buffer.numel() >= slot_bytes * slots
        self.buffer = buffer
        self.slot_bytes = slot_bytes
        first = buffer.data_ptr()
        self._free = [Slot(n, n * slot_bytes, first + n * slot_bytes) for n in range(slots)]
        self._holders: dict[int, H] = {}
        self._changed = threading.Condition()

    @property
    def holders(self) -> list[H]:
        """Of slots that are not free."""
        with self._changed:
            return list(self._holders.values())

    def take(self, holder: H) -> Slot | None:
        """None: none is free."""
        with self._changed:
            if not self._free:
                return None
            slot = self._free.pop()
            self._holders[slot.index] = holder
            return slot

    def acquire(self, holder: H, timeout_s: float) -> Slot:
        """Waits for a free slot. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout_s):
                raise TimeoutError(f"no staging slot became free in {timeout_s} s: the link does not keep up")
            slot = self.take(holder)
        assert slot is not None
        return slot

    def release(self, slot: Slot) -> None:
        with self._changed:
            assert slot not in self._free
            self._free.append(slot)
            del self._holders[slot.index]
            self._changed.notify()
