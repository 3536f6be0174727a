# SPDX-License-Identifier: Apache-2.0
"""One layer of a step transfer on its way from the model's thread to the sender's.

The model's thread makes a `LayerPush`; then the sender's thread owns it. Only `StagedLayer` is shared, with the side
stream: its lock guards who gets the staging slot.
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
    """The staging slot of a layer that is regrouped: the side stream hands it over filled, the sender takes it back.
    Either may come first."""

    def __init__(self, computed: Event, tensor_bytes: int) -> None:
        # When regrouping can begin.
        self.computed = computed
        # What each tensor takes in the slot.
        self._tensor_bytes = tensor_bytes
        self._lock = threading.Lock()
        # Both change under the lock.
        self._slot: Slot | None = None
        self._given_up = False

    def fill(self, slot: Slot) -> bool:
        """Hands over a slot with the layer's bytes. False: the sender has given up, and the caller keeps the slot."""
        with self._lock:
            if not self._given_up:
                self._slot = slot
            return not self._given_up

    def take_back(self) -> Slot | None:
        """Nothing of the layer is read any more. Returns the slot for release, if there is one."""
        with self._lock:
            self._given_up = True
            return self._slot

    def address(self, tensor: int) -> int:
        """Where the layer's `tensor` begins, once the slot is filled."""
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
    # Where they are read from if they are regrouped, else None: from the cache.
    staged: StagedLayer | None = None
    # When its first write began, on the monotonic clock.
    begun: float = 0.0
    # After a failed write: until when its bytes may still be read, in running time.
    settled_at: float = 0.0

    def sources(self, target: LayerTarget) -> list[int]:
        """Returns the addresses that the source offsets of each part of the target's shape count from."""
        if self.staged is None:
            return [self.tensors[n].base for n in target.sources]
        return [self.staged.address(n) for n in target.sources]
