# SPDX-License-Identifier: Apache-2.0
"""Buffers that several layers use in turn, on prefill engines that keep the KV of a few layers only.

A layer overwrites the KV of the layer before it in the same buffer. So before it is written, every read of that KV must
be over (R3). A read of a regrouped layer is over once the layer is in its staging slot. Any other read is over once all
writes of the layer are, and, after a failed one, once its settling time has passed.

The model's thread adds reads. It waits for them, too, or a thread of another connector does, which loads KV into the
buffer. A lock guards what they share.
"""

import threading
import time
from collections.abc import Collection, Sequence

from vllm_ascend_pd.core.observer import PushDelayed
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import LOOK_S
from vllm_ascend_pd.prefill.step_send import LayerPush, StepSend


class BufferTurns:
    """The reads under way of each buffer that layers use in turn."""

    def __init__(self, rank: PrefillRank) -> None:
        self._rank = rank
        self._layers = rank.caches.layers
        # By layer: the addresses of its buffers. Layers that have theirs alone are left out.
        self._buffers = {
            layer: frozenset(rank.caches.description.tensors[index].base for index in rank.caches.layers[layer])
            for layer in {layer for pair in rank.caches.sharing_buffers for layer in pair}
        }
        self._grant_wait_s = rank.config.control_timeout_s
        # A failed write may go on reading.
        self._write_wait_s = rank.config.write_timeout_s + rank.engine.limits.rest_s
        # Guards the two below.
        self._changed = threading.Condition()
        # The reads that nobody has waited for, in order.
        self._reads: list[LayerPush] = []
        # A layer whose KV is in its buffer, and what is sent of it. None once its reads are added.
        self._written: tuple[str, Sequence[StepSend]] | None = None

    def __contains__(self, layer: object) -> bool:
        """Whether a layer uses a buffer in turn with others."""
        return layer in self._buffers

    # On the model's thread.

    def mark_written(self, layer: str, sends: Sequence[StepSend]) -> None:
        """The layer's KV is in its buffer. Whoever waits for the buffer also waits for the reads that `add_reads` adds.

        `layer`: "" or a name of several layers if it is not known which one it is. Then it may be any.
        """
        if layer in self._buffers or layer not in self._layers:
            with self._changed:
                self._written = layer, sends

    def add_reads(self, layer: str, pushes: Sequence[LayerPush]) -> None:
        """Adds the reads of a layer. There may be none.

        Raises RuntimeError if the layer was written although nobody had waited for the reads of the layer before it.
        """
        with self._changed:
            self._written = None
            self._changed.notify_all()
            if layer not in self._buffers:
                return
            for earlier in self._of([layer]):
                if earlier.layer != layer:
                    raise RuntimeError(
                        f"{layer} was written to a buffer from which {earlier.layer} may still be sent: vllm-ascend "
                        "did not wait for it (wait_for_layer_load, wait_for_layer_reuse)"
                    )
            self._reads += pushes

    # On any thread.

    def wait(self, layers: Collection[str]) -> None:
        """Waits until the buffers of `layers` may be overwritten.

        A read that does not end in time fails its requests, so that decode discards what arrives of them.
        """
        began = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_written(layers), self._write_wait_s):
                assert self._written is not None
                layer, sends = self._written
                for send in sends:
                    send.fail(f"layer {layer!r} was not saved in time", PushFailure.INTERNAL)
            reads = self._of(layers)
        if not reads:
            return
        for push in reads:
            self._end(push, began)
        with self._changed:
            self._reads = [push for push in self._reads if push not in reads]
        self._rank.observer.on(PushDelayed(time.monotonic() - began))

    def _is_written(self, layers: Collection[str]) -> bool:
        if self._written is None or not (buffers := self._buffers_of(layers)):
            return False
        return bool(self._buffers.get(self._written[0], buffers) & buffers)

    def _of(self, layers: Collection[str]) -> list[LayerPush]:
        """Returns the reads of the buffers of `layers`."""
        buffers = self._buffers_of(layers)
        return [push for push in self._reads if self._buffers[push.layer] & buffers]

    def _buffers_of(self, layers: Collection[str]) -> frozenset[int]:
        return frozenset[int]().union(*(self._buffers.get(layer, ()) for layer in layers))

    def _end(self, push: LayerPush, began: float) -> None:
        """Waits for a read, for which the wait has begun at `began`. If it takes too long, its requests fail."""
        assert push.over is not None
        is_staged = push.step_send.mapping.is_staged
        is_over = push.has_left_cache if is_staged else push.over.wait
        granted_until = began + self._grant_wait_s
        if not is_over(max(0.0, granted_until - time.monotonic())):
            if not is_staged:
                push.step_send.give_up_ungranted(f"no grant came while the buffer of {push.layer} was needed")
            if not is_over(max(0.0, granted_until + self._write_wait_s - time.monotonic())):
                reason = f"{push.layer} was not sent while its buffer was needed: the link does not keep up"
                push.step_send.fail(reason, PushFailure.QUEUE_FULL)
                return
        while not is_staged and (left := push.settled_at - self._rank.running_time()) > 0:
            time.sleep(min(left, LOOK_S))
