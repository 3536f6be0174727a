# SPDX-License-Identifier: Apache-2.0
"""One layer of a step transfer, which the model's thread passes to the sender's thread.

The model's thread makes a `LayerPush`. From then on the sender's thread owns it. Only its `StagedLayer` is shared with
the side stream, under a lock.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core.layout import CacheTensor
from vllm_ascend_pd.device.base import Event
from vllm_ascend_pd.prefill.decode_layout import LayerTarget
from vllm_ascend_pd.prefill.staging import Slot
from vllm_ascend_pd.prefill.step_transfer import StepTransfer
from vllm_ascend_pd.prefill.write_plan import StepWrites


class StagedLayer:
    """The staging slot of a regrouped layer.

    The side stream hands the filled slot over, and the sender takes it for release. If the sender gives up first, the
    side stream keeps the slot.
    """

    def __init__(self, computed: Event, tensor_bytes: int) -> None:
        # When regrouping can begin.
        self.computed = computed
        # Bytes of each tensor in the slot.
        self._tensor_bytes = tensor_bytes
        self._lock = threading.Lock()
        # Both change under the lock.
        self._slot: Slot | None = None
        self._given_up = False

    def fill(self, slot: Slot) -> bool:
        """Hands over a slot with the layer's bytes. Returns False if the sender has given up: keep it then."""
        with self._lock:
            if not self._given_up:
                self._slot = slot
            return not self._given_up

    def take_back(self) -> Slot | None:
        """Returns the slot for release, if there is one. Nothing of the layer may be read any more."""
        with self._lock:
            self._given_up = True
            return self._slot

    def address(self, tensor: int) -> int:
        """Returns the address of the layer's `tensor`, once the slot is filled."""
        assert self._slot is not None
        return self._slot.address + tensor * self._tensor_bytes


@dataclass(slots=True)
class LayerPush:
    """The tensors of one layer that one step transfer reads."""

    layer: str
    step_transfer: StepTransfer
    writes: StepWrites
    tensors: Sequence[CacheTensor]
    # When the bytes can be read.
    ready: Event
    # The staging slot that they are read from. None if they are read from the cache.
    staged: StagedLayer | None = None
    # When its first write began, on the monotonic clock.
    begun: float = 0.0
    # Until when a failed write may still read the bytes, in running time. 0 if no write has failed.
    settled_at: float = 0.0

    def sources(self, target: LayerTarget) -> list[int]:
        """Returns the addresses that the source offsets of each part of the target's shape count from."""
        if self.staged is None:
            return [self.tensors[n].base for n in target.sources]
        return [self.staged.address(n) for n in target.sources]
