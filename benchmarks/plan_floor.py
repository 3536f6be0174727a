# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/plan.py: the least that pushing layer by layer takes from Python, with nothing decided in it."""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from plan_step import TIMEOUT_S, Case, Cost, Handed, Stopwatch

_LOOK_S = 50e-6
_LAYER_BYTES = 1 << 30  # from a layer's addresses to the next one's: any will do


class _Call(NamedTuple):
    """Into Mooncake, of every layer. `src`, `dst`: the first layer's addresses; `sources`, `destinations`: any layer's,
    which are written through `to`."""

    src: Any
    dst: Any
    to: tuple[Any, Any]
    sources: array[int]
    destinations: array[int]
    lengths: list[int]


class Floor:
    """Of each layer: the model's thread records an event, where `case` regroups it changes to a side stream and back,
    waits for the event there and records another, and hands it to a thread that waits for it, adds the layer's
    addresses and calls Mooncake, with as many descriptors as ours has. Which, and that they may be written, nobody has
    to find out; nothing is counted, traced, bounded or told to anybody."""

    def __init__(self, case: Case, layers: int, ours: Handed) -> None:
        """`ours`: after its first step."""
        import torch

        self._case, self._layers = case, layers
        self.handed = Handed()
        self.handed.writes, self.handed.per_layer = None, ours.per_layer
        assert ours.writes is not None
        self._calls = [_call(*write) for write in ours.writes[: len(ours.writes) // layers]]
        self._model, self._side = torch.npu.current_stream(), torch.npu.Stream()
        self._tasks: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
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
        if self._error is not None:
            raise RuntimeError("the floor's thread failed") from self._error
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

        try:
            torch.npu.set_device(0)
            while (task := self._tasks.get()) is not None:
                layer, event = task
                while not event.query():
                    time.sleep(_LOOK_S)
                base = layer * _LAYER_BYTES
                for src, dst, to, sources, destinations, lengths in self._calls:
                    np.add(src, base, to[0])
                    np.add(dst, base, to[1])
                    self.handed.batch_transfer_sync_write("", sources, destinations, lengths)
        except Exception as error:  # noqa: BLE001 - `step` raises it
            self._error = error

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(TIMEOUT_S)


def _call(src: Sequence[int], dst: Sequence[int], lengths: list[int]) -> _Call:
    sources, destinations = array("q", src), array("q", dst)
    first, second = (np.array(addresses, dtype=np.int64) for addresses in (src, dst))
    to = np.frombuffer(sources, dtype=np.int64), np.frombuffer(destinations, dtype=np.int64)
    return _Call(first, second, to, sources, destinations, list(lengths))
