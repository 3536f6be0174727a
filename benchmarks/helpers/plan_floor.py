# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/plan.py: the least that pushing layer by layer takes from Python, with nothing decided in it."""

import queue
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np

from helpers.plan_step import TIMEOUT_S, Case, Cost, Handed, Stopwatch

_LOOK_S = 50e-6
_LAYER_BYTES = 1 << 30  # from a layer's addresses to the next one's: any will do


class Floor:
    """Of each layer: the model's thread records an event, where `case` regroups it changes to a side stream and back,
    waits for the event there and records another, and hands it to a thread that waits for it, adds the layer's
    addresses and calls Mooncake, with as many descriptors as ours has. Which, and that they may be written, nobody has
    to find out; nothing is counted, traced, bounded or told to anybody."""

    def __init__(self, case: Case, layers: int, ours: Handed) -> None:
        """`ours`: after its first step."""
        import torch

        from vllm_ascend_pd.core.plan import Descriptors
        from vllm_ascend_pd.transport.batches import Batches, TransferLimits

        self._case, self._layers = case, layers
        self.handed = Handed()
        self.handed.writes, self.handed.per_layer = None, ours.per_layer
        assert ours.writes is not None
        first_layer = [Descriptors(*map(np.array, write)) for write in ours.writes[: len(ours.writes) // layers]]
        self._parts = len(first_layer)
        limits = replace(TransferLimits.over("ascend"), connections=1)
        self._batches = Batches.cut(first_layer, limits)
        self._model, self._side = torch.npu.current_stream(), torch.npu.Stream()
        self._tasks: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pd-floor", daemon=True)
        self._thread.start()

    def step(self) -> Cost:
        watch = Stopwatch("pd-floor", None)
        for layer in range(self._layers):
            self.handed.count = 0
            with watch.model("save"):
                self._computed(layer)
            self.handed.wait(layer)
        watch.all_written()
        return watch.cost(self._layers)

    def _computed(self, layer: int) -> None:
        import torch

        event = self._model.record_event()
        if self._case.ratio > 1:
            torch.npu.set_stream(self._side)
            self._side.wait_event(event)
            event = self._side.record_event()
            torch.npu.set_stream(self._model)
        self._tasks.put((layer, event))

    def _run(self) -> None:
        import torch

        torch.npu.set_device(0)
        while (task := self._tasks.get()) is not None:
            layer, event = task
            while not event.query():
                time.sleep(_LOOK_S)
            bases = [layer * _LAYER_BYTES] * self._parts
            for batch in self._batches.at(bases, bases):
                self.handed.batch_transfer_sync_write("", *batch)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(TIMEOUT_S)
