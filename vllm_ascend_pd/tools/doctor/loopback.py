# SPDX-License-Identifier: Apache-2.0
"""Transfers between two transfer engines on this machine, compares every byte, and measures what descriptors cost.

A child of the doctor writes. It starts the process whose memory it writes to, because a Mooncake engine and an NPU
belong to one process each. Over TCP both use host memory, over `ascend` the memory of two NPUs.
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import subprocess
import sys
import time
from array import array

import msgspec

from vllm_ascend_pd.tools.doctor.process import Line, child, run, say
from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, finding, ok
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine

TRANSFER_BYTES = 64 << 20
TIMEOUT_S = 90.0

GUARD_BYTES = 4096
"""Bytes registered after the written ones, which must stay unchanged."""

PIECE_BYTES = 256 << 10
"""Bytes of a descriptor of the compared transfer: some adjacent KV blocks of a layer."""

DESCRIPTOR_BYTES = tuple((16 << 10) << doubled for doubled in range(8))
"""The measured sizes, 16 KiB to 2 MiB. A block of 128 tokens has 16 KiB in the smaller of MLA's tensors, 32 KiB with
one KV head of 128 in bfloat16; neighbouring blocks become one descriptor."""

_BATCH = 2048  # descriptors of a measured batch, as many as the engine puts into one over TCP
_MEASURED_S = 0.2  # each size is written for at least this long


class Way(msgspec.Struct, frozen=True):
    """A way for bytes from one process to another, and what is sent on it."""

    check: str  # the name of the finding
    name: str  # of the way in the names descriptors.NAME.SIZE
    between: str  # the way in words: from where to where, and over what
    action: str  # what to do if a transfer fails
    protocol: str  # Mooncake's
    host: str  # where both engines listen
    source: int | None = None  # the NPU whose memory is sent; None: host memory
    destination: int | None = None  # the NPU whose memory is written to
    num_bytes: int = TRANSFER_BYTES
    writes: int = 1  # how often the bytes are sent, to measure the speed
    descriptor_bytes: tuple[int, ...] = ()  # sizes of descriptors to measure, too
    environment: dict[str, str] = {}  # variables of both processes, besides the doctor's
    failed: Level = Level.ERROR  # the finding's level if the transfer fails
    seed: int = 0  # the bytes follow from it


class DescriptorCost(msgspec.Struct, frozen=True):
    """What a descriptor of `num_bytes` takes, in seconds, in batches of many."""

    num_bytes: int
    seconds: float


class Transferred(msgspec.Struct, frozen=True):
    """The result of a way."""

    seconds: float  # for all writes
    descriptors: int  # in each write
    wrong: int = 0  # bytes that are not what was sent
    first: int = -1  # the place of the first one
    costs: tuple[DescriptorCost, ...] = ()


def over_tcp(descriptor_bytes: tuple[int, ...] = ()) -> Way:
    """Returns the way over TCP, from the host memory of one process to another's."""
    # With this variable, Mooncake does not support IPv4.
    host = "::1" if "MC_USE_IPV6" in os.environ else "127.0.0.1"
    return Way(
        check="transfer.loopback",
        name="tcp",
        between="from one Mooncake engine to another over TCP",
        action="check that Mooncake can be loaded, that no MC_* variable is set by mistake, and that nothing filters "
        "connections from 127.0.0.1 to itself (with MC_USE_IPV6: ::1)",
        protocol="tcp",
        host=host,
        descriptor_bytes=descriptor_bytes,
    )


def check(way: Way, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """Returns the finding about the transfer, and one for each measured size of descriptors."""
    seeded = msgspec.structs.replace(way, seed=secrets.randbits(63))
    ran = run(child("loopback", "send", encoded(seeded)), timeout_s, way.environment)
    results = ran.reports(Transferred)
    if ran.problem is None and results:
        return judge(way, results[0])
    last = f" ({ran.last_words})" if ran.last_words else ""
    found = f"a transfer {way.between} failed: the process {ran.problem or 'reported nothing'}{last}"
    return [finding(way.failed, way.check, found, way.action)]


def judge(way: Way, result: Transferred) -> list[Finding]:
    if result.wrong:
        found = (
            f"{result.wrong} of {way.num_bytes} bytes {way.between} arrived wrong, the first at {result.first}, and no "
            "error was reported"
        )
        return [error(way.check, found, "do not use this Mooncake: install the version that requirements/ names")]
    total = way.num_bytes * way.writes
    speed = total / max(result.seconds, 1e-9)
    times = f"{way.writes} times " if way.writes > 1 else ""
    found = (
        f"{times}{way.num_bytes / 2**20:g} MiB in {result.descriptors} pieces {way.between}, every byte right: "
        f"{speed / 1e9:.3g} GB/s"
    )
    figures = {"bytes": total, "seconds": round(result.seconds, 6), "bytes_per_second": round(speed)}
    return [ok(way.check, found, **figures), *(_judge_cost(way, cost) for cost in result.costs)]


def _judge_cost(way: Way, cost: DescriptorCost) -> Finding:
    speed = cost.num_bytes / max(cost.seconds, 1e-9)
    return ok(
        f"descriptors.{way.name}.{cost.num_bytes}",
        f"descriptors of {cost.num_bytes >> 10} KiB: {cost.seconds * 1e6:.1f} us each, {speed / 1e9:.3g} GB/s",
        protocol=way.protocol,
        bytes=cost.num_bytes,
        seconds=round(cost.seconds, 9),
        bytes_per_second=round(speed),
    )


def encoded(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


# What follows runs in the child processes.


class HostMemory:
    """Memory that an engine can register. It is zero until something is written."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(num_bytes)
        self.address = ctypes.addressof(self._buffer)

    def fill(self, content: bytes) -> None:
        """Writes `content` to the start."""
        ctypes.memmove(self.address, content, len(content))

    def read(self, num_bytes: int) -> bytes:
        """Returns the first bytes."""
        return self._buffer.raw[:num_bytes]


class NpuMemory:
    """The same on an NPU, allocated like the staging buffer. Makes the NPU the current one of the calling thread."""

    def __init__(self, num_bytes: int, device: int) -> None:
        import torch
        import torch_npu  # noqa: F401 - makes torch.npu

        from vllm_ascend_pd.device.npu import NpuDevice

        torch.npu.set_device(device)
        self._torch, self._tensor = torch, NpuDevice().allocate(num_bytes).zero_()
        torch.npu.synchronize()
        self.address: int = self._tensor.data_ptr()

    def fill(self, content: bytes) -> None:
        buffer = self._torch.frombuffer(bytearray(content), dtype=self._torch.uint8)
        self._tensor[: len(content)].copy_(buffer)
        self._torch.npu.synchronize()

    def read(self, num_bytes: int) -> bytes:
        return bytes(self._tensor[:num_bytes].cpu().numpy())


class Receiver(msgspec.Struct, frozen=True):
    """The location of the receiver's memory."""

    session: str
    address: int


class Compared(msgspec.Struct, frozen=True):
    """The number of wrong bytes, and the place of the first one."""

    wrong: int
    first: int = -1


def main() -> None:
    role, argument = sys.argv[1:]
    way = msgspec.json.decode(argument, type=Way)
    device, size = way.source if role == "send" else way.destination, way.num_bytes + GUARD_BYTES
    memory = HostMemory(size) if device is None else NpuMemory(size, device)
    engine = TransferEngine(way.host, way.protocol, TransferLimits.over(way.protocol))
    engine.register([(memory.address, size)])
    payload = random.Random(way.seed).randbytes(way.num_bytes)
    if role == "send":
        memory.fill(payload)
        say(_send(engine, memory.address, way))
    else:
        say(Receiver(engine.session, memory.address))
        if sys.stdin.readline():
            say(compare(memory.read(size), payload + bytes(GUARD_BYTES)))
    engine.close()


def compare(memory: bytes, wanted: bytes) -> Compared:
    if memory == wanted:
        return Compared(0)
    wrong = [place for place, (one, other) in enumerate(zip(memory, wanted, strict=True)) if one != other]
    return Compared(len(wrong), wrong[0])


def _send(engine: TransferEngine, start: int, way: Way) -> Transferred:
    command = child("loopback", "receive", encoded(way))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        receiver = _hear(process, Receiver)
        seconds, descriptors = write(engine, start, receiver, way)
        costs = tuple(
            DescriptorCost(size, _measure(engine, start, receiver, size, way.num_bytes // size))
            for size in way.descriptor_bytes
        )
        assert process.stdin is not None
        process.stdin.write("look\n")
        process.stdin.flush()
        compared = _hear(process, Compared)
    return Transferred(seconds, descriptors, compared.wrong, compared.first, costs)


def _hear(process: subprocess.Popen[str], kind: type[Line]) -> Line:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("the receiving process ended")
    return msgspec.json.decode(line, type=kind)


def write(engine: TransferEngine, start: int, receiver: Receiver, way: Way) -> tuple[float, int]:
    """Returns the seconds of all writes, and the number of descriptors in each."""
    offsets = range(0, way.num_bytes, PIECE_BYTES)
    lengths = [min(PIECE_BYTES, way.num_bytes - offset) for offset in offsets]
    sources, destinations = [start + o for o in offsets], [receiver.address + o for o in offsets]
    engine.write(receiver.session, [start], [receiver.address], [1])  # connects, which must not be measured
    began = time.monotonic()
    for _ in range(way.writes):
        engine.write(receiver.session, sources, destinations, lengths)
    return time.monotonic() - began, len(lengths)


def _measure(engine: TransferEngine, start: int, receiver: Receiver, size: int, places: int) -> float:
    """Returns the seconds that a descriptor of `size` bytes takes. They are in no order, as the blocks of a cache.

    The batches are made here, because the engine would cut long descriptors to divide them among connections.
    """
    offsets = [place * size for place in range(places)]
    random.Random(size).shuffle(offsets)
    del offsets[_BATCH:]
    batch = (
        array("q", [start + offset for offset in offsets]),
        array("q", [receiver.address + offset for offset in offsets]),
        [size] * len(offsets),
    )
    batches, began = 0, time.monotonic()
    while (seconds := time.monotonic() - began) < _MEASURED_S or not batches:
        engine.write_batches(receiver.session, [batch])
        batches += 1
    return seconds / (batches * len(offsets))
