# SPDX-License-Identifier: Apache-2.0
"""A child of the doctor: one of two transfer engines that write to each other.

`receive TASK`: registers memory, reports its address, and checks its content when told to on standard input.
`send TASK SESSION ADDRESS`: writes bytes that follow from the task's seed there, and reports how long that took.
"""

from __future__ import annotations

import ctypes
import random
import sys
import time
from abc import ABC, abstractmethod

import msgspec

from vllm_ascend_pd.tools.doctor import child
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine

GUARD_BYTES = 4096
"""Bytes registered after the written ones, which must stay unchanged."""

PIECE_BYTES = 256 << 10
"""Bytes of a descriptor: some adjacent KV blocks of a layer."""


class Task(msgspec.Struct, frozen=True):
    """The task of a process.

    device: the NPU whose memory it registers; None for host memory.
    writes: how often the same bytes are written.
    """

    seed: int
    nbytes: int
    host: str
    protocol: str = "tcp"
    device: int | None = None
    writes: int = 1

    def argument(self) -> str:
        """Encodes the task as one word of a command line."""
        return msgspec.json.encode(self).decode()


class Ready(msgspec.Struct, frozen=True):
    """The location of the receiver's memory."""

    session: str
    address: int


class Checked(msgspec.Struct, frozen=True):
    """The number of wrong bytes, and the place of the first one."""

    wrong: int
    first: int = -1


class SendTiming(msgspec.Struct, frozen=True):
    """The duration of a series of writes."""

    seconds: float  # for all writes
    descriptors: int  # in each write


class Memory(ABC):
    """Memory that an engine can register. It is zero at first."""

    address: int
    num_bytes: int

    @abstractmethod
    def fill(self, content: bytes) -> None:
        """Writes `content` to the start."""

    @abstractmethod
    def read(self, num_bytes: int) -> bytes:
        """Returns the first bytes."""


class HostMemory(Memory):
    def __init__(self, num_bytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(num_bytes)
        self.address, self.num_bytes = ctypes.addressof(self._buffer), num_bytes

    def fill(self, content: bytes) -> None:
        ctypes.memmove(self.address, content, len(content))

    def read(self, num_bytes: int) -> bytes:
        return self._buffer.raw[:num_bytes]


class NpuMemory(Memory):
    """Allocates like the staging buffer. Makes the NPU the current one of the calling thread."""

    def __init__(self, num_bytes: int, device: int) -> None:
        import torch
        import torch_npu  # noqa: F401 - makes torch.npu

        from vllm_ascend_pd.device.npu import NpuDevice

        torch.npu.set_device(device)
        self._tensor = NpuDevice().allocate(num_bytes).zero_()
        torch.npu.synchronize()
        self.address, self.num_bytes = self._tensor.data_ptr(), self._tensor.numel()

    def fill(self, content: bytes) -> None:
        import torch

        self._tensor[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        torch.npu.synchronize()

    def read(self, num_bytes: int) -> bytes:
        return bytes(self._tensor[:num_bytes].cpu().numpy())


def main() -> None:
    role, argument, *rest = sys.argv[1:]
    out = child.take_stdout()
    task = msgspec.json.decode(argument, type=Task)
    payload = random.Random(task.seed).randbytes(task.nbytes)
    size = task.nbytes + GUARD_BYTES
    memory = HostMemory(size) if task.device is None else NpuMemory(size, task.device)
    engine = TransferEngine(task.host, task.protocol, TransferLimits.over(task.protocol))
    engine.register([(memory.address, memory.num_bytes)])
    if role == "receive":
        child.say(out, Ready(engine.session, memory.address))
        if sys.stdin.readline().strip() == "look":
            child.say(out, compare(memory.read(size), payload + bytes(GUARD_BYTES)))
    else:
        session, address = rest
        memory.fill(payload)
        child.say(out, _send(engine, task, memory.address, session, int(address)))
    engine.close()


def compare(memory: bytes, wanted: bytes) -> Checked:
    if memory == wanted:
        return Checked(0)
    wrong = [place for place, (one, other) in enumerate(zip(memory, wanted, strict=True)) if one != other]
    return Checked(len(wrong), wrong[0])


def _send(engine: TransferEngine, task: Task, start: int, session: str, address: int) -> SendTiming:
    offsets = range(0, task.nbytes, PIECE_BYTES)
    lengths = [min(PIECE_BYTES, task.nbytes - offset) for offset in offsets]
    sources, destinations = [start + o for o in offsets], [address + o for o in offsets]
    engine.write(session, [start], [address], [1])  # connects, which must not be measured
    began = time.monotonic()
    for _ in range(task.writes):
        engine.write(session, sources, destinations, lengths)
    return SendTiming(time.monotonic() - began, len(lengths))
