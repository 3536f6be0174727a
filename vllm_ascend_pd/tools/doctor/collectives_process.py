# SPDX-License-Identifier: Apache-2.0
"""A child of the doctor: one rank of a model's collectives, with the connector's all-to-all beside them.

The world's group is the model's and reduces on the current stream. The second group is made as the connector makes it,
and exchanges on the side stream. Arguments: `RANK SIZE STORE`; `STORE` is a new file by which ranks find each other.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401 - makes torch.npu

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.device.base import Event, Group
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.tools.doctor import child
from vllm_ascend_pd.tools.doctor.collectives import LAYERS, STAGES, Reached

SECTION_BYTES = 1 << 20
"""Bytes that a rank sends to each rank per layer."""

HIDDEN = (512, 4096)
"""Tokens and elements that the model's ranks reduce twice per layer: 4 MiB."""

_TOGETHER_S = 3.0
_TIMEOUT_S = 20.0
_JITTER_S = 1e-3
_CHARS = 500


class CollectiveRank:
    """One rank: runs the stages one after the other, and checks their results."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        self.rank, self.size = rank, size
        torch.npu.set_device(rank)
        timeout = timedelta(seconds=_TIMEOUT_S)
        dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        self.device = NpuDevice()
        self.hidden = torch.zeros(HIDDEN, dtype=torch.bfloat16, device="npu")
        self.sent = [self.device.allocate(size * SECTION_BYTES)[: size * SECTION_BYTES] for _ in range(LAYERS)]
        self.received = [self.device.allocate(size * SECTION_BYTES)[: size * SECTION_BYTES] for _ in range(LAYERS)]
        for layer, buffer in enumerate(self.sent):
            values = [self._value(layer, rank, receiver) for receiver in range(size)]
            buffer.view(size, -1).copy_(torch.tensor(values, dtype=torch.uint8).view(-1, 1).npu())
        self.group: Group | None = None
        self._chance = random.Random(rank)

    def connect_model(self) -> Reached:
        return self._memory(STAGES[0], lambda: self._reduce(0))

    def connect_exchange(self) -> Reached:
        ranks = tuple(range(self.size))

        def connect() -> None:
            self.group = self.device.new_groups([ranks], _TIMEOUT_S)[ranks]
            self._exchange(0).wait(_TIMEOUT_S)

        return self._memory(STAGES[1], connect)

    def reduce_alone(self) -> Reached:
        seconds, rounds = self._rounds(exchange=False, reduce=True)
        return Reached(STAGES[2], seconds, 2 * LAYERS * self.hidden.nbytes, rounds, self._wrong_sum())

    def exchange_alone(self) -> Reached:
        seconds, rounds = self._rounds(exchange=True, reduce=False)
        return Reached(STAGES[3], seconds, self._sent_bytes(), rounds, self._wrong_bytes())

    def together(self) -> Reached:
        for buffer in self.received:
            buffer.zero_()
        seconds, rounds = self._rounds(exchange=True, reduce=True)
        return Reached(STAGES[4], seconds, self._sent_bytes(), rounds, self._wrong_sum() or self._wrong_bytes())

    def _rounds(self, exchange: bool, reduce: bool) -> tuple[float, int]:
        """Returns the seconds of the shortest round and the number of rounds. All ranks stop after the same round."""
        began, best, rounds = time.monotonic(), float("inf"), 0
        while True:
            self._barrier()
            started = time.monotonic()
            events = []
            for layer in range(LAYERS):
                if self._chance.random() < 0.1:  # so that ranks queue the two groups' collectives at different times
                    time.sleep(self._chance.random() * _JITTER_S)
                if reduce:
                    self._reduce(layer)
                if exchange:
                    events.append(self._exchange(layer))
                if reduce:
                    self._reduce(layer)
            for event in [*events, self.device.record_event()]:
                event.wait(_TIMEOUT_S)
            best, rounds = min(best, time.monotonic() - started), rounds + 1
            if self._all_are_past(began + _TOGETHER_S / (1 if exchange and reduce else 3)):
                return best, rounds

    def _reduce(self, layer: int) -> None:
        self.hidden.fill_(float(self.rank + layer))
        dist.all_reduce(self.hidden)

    def _exchange(self, layer: int) -> Event:
        assert self.group is not None
        group, received, sent = self.group, self.received[layer], self.sent[layer]
        return self.device.submit(
            lambda: self.device.all_to_all(received, sent, group), after=self.device.record_event()
        )

    def _barrier(self) -> None:
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="npu"))
        self.device.record_event().wait(_TIMEOUT_S)

    def _all_are_past(self, deadline: float) -> bool:
        over = torch.tensor([int(time.monotonic() >= deadline)], dtype=torch.int32).npu()
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        return bool(over.item())

    def _memory(self, stage: str, connect: Callable[[], None]) -> Reached:
        before, _ = torch.npu.mem_get_info()
        began = time.monotonic()
        connect()
        self.device.record_event().wait(_TIMEOUT_S)
        seconds = time.monotonic() - began
        after, _ = torch.npu.mem_get_info()
        return Reached(stage, seconds, max(0, before - after))

    def _value(self, layer: int, sender: int, receiver: int) -> int:
        return (31 * layer + 7 * sender + receiver) % 251 + 1

    def _sent_bytes(self) -> int:
        return LAYERS * (self.size - 1) * SECTION_BYTES

    def _wrong_sum(self) -> str:
        expected = float(sum(rank + LAYERS - 1 for rank in range(self.size)))
        wrong = int(self.hidden.cpu().ne(expected).sum())
        return f"{wrong} of {self.hidden.numel()} sums of the all-reduce are wrong" if wrong else ""

    def _wrong_bytes(self) -> str:
        for layer, buffer in enumerate(self.received):
            values = [self._value(layer, sender, self.rank) for sender in range(self.size)]
            expected = torch.tensor(values, dtype=torch.uint8).view(-1, 1)
            wrong = int(buffer.cpu().view(self.size, -1).ne(expected).sum())
            if wrong:
                return f"{wrong} of {buffer.numel()} bytes of the all-to-all of layer {layer} are wrong"
        return ""


def main() -> None:
    rank, size, store = sys.argv[1:]
    out = child.take_stdout()
    passed = 0
    try:
        each = CollectiveRank(int(rank), int(size), Path(store))
        steps = (each.connect_model, each.connect_exchange, each.reduce_alone, each.exchange_alone, each.together)
        for step in steps:
            child.say(out, step())
            passed += 1
        dist.barrier()
    except Exception as error:  # noqa: BLE001 - torch_npu raises all kinds
        stage = STAGES[min(passed, len(STAGES) - 1)]
        child.say(out, Reached(stage, problem=one_line(f"{type(error).__name__}: {error}", _CHARS)))
    os._exit(0)  # a failed group may never end
