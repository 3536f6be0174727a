# SPDX-License-Identifier: Apache-2.0
"""Transfers between two transfer engines on this machine, compares every byte, and measures what descriptors cost.

A child of the doctor writes and judges. It starts the process whose memory it writes to, because a Mooncake engine and
an NPU belong to one process each. Over TCP both use host memory, over `ascend` the memory of two NPUs.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import secrets
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import TypeAlias

import msgspec

from vllm_ascend_pd.tools.doctor.report import Finding, Level, error, finding, ok
from vllm_ascend_pd.tools.programs import child, end_with, run
from vllm_ascend_pd.transport import ascend
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine

TRANSFER_BYTES = 64 << 20
TIMEOUT_S = 90.0

WRITE = "hardware.write."
GUARD_BYTES = 4096
"""Bytes registered after the written ones, which must stay unchanged."""

PIECE_BYTES = 256 << 10
"""Bytes of a descriptor of the compared transfer: some adjacent KV blocks of a layer."""

DESCRIPTOR_BYTES = tuple((16 << 10) << doubled for doubled in range(8))
"""The measured sizes, 16 KiB to 2 MiB. A block of 128 tokens has 16 KiB in the smaller of MLA's tensors, 32 KiB with
one KV head of 128 in bfloat16; neighbouring blocks become one descriptor."""

Receiver: TypeAlias = tuple[str, int]
"""The receiving engine's session, and the address of its memory."""
_BATCH = 2048  # descriptors of a measured batch, as many as the engine puts into one over TCP
_MEASURED_S = 0.2  # each size is written for at least this long


class Way(msgspec.Struct, frozen=True):
    """A way for bytes from one process to another, and what is sent on it."""

    check: str  # the name of the finding; the part behind `WRITE` names those about descriptors, too
    between: str  # the way in words: from where to where, and over what
    action: str  # what to do if a transfer fails
    protocol: str  # Mooncake's
    host: str  # where both engines listen
    source: int | None = None  # the NPU whose memory is sent; None: host memory
    destination: int | None = None  # the NPU whose memory is written to
    num_bytes: int = TRANSFER_BYTES
    room_before: int = 0  # bytes of the receiver's region before those that are written to
    descriptor_bytes: tuple[int, ...] = ()  # sizes of descriptors to measure, too
    environment: dict[str, str] = {}  # variables of both processes, besides the doctor's
    failed: Level = Level.ERROR  # the finding's level if the transfer fails
    seed: int = 0  # the bytes follow from it


def over_tcp() -> Way:
    """Returns the way over TCP, from the host memory of one process to another's."""
    # With this variable, Mooncake does not support IPv4.
    host = "::1" if "MC_USE_IPV6" in os.environ else "127.0.0.1"
    return Way(
        check="transfer.loopback",
        between="from one Mooncake engine to another over TCP",
        action="check that Mooncake can be loaded, that no MC_* variable is set by mistake, and that nothing filters "
        "connections from 127.0.0.1 to itself (with MC_USE_IPV6: ::1)",
        protocol="tcp",
        host=host,
    )


def check(way: Way, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """Returns the finding about the transfer, and one for each measured size of descriptors."""
    seeded = msgspec.structs.replace(way, seed=secrets.randbits(63))
    ran = run(child(f"{__package__}.loopback", msgspec.json.encode(seeded).decode()), timeout_s, way.environment)
    findings = ran.reports(Finding)
    if ran.problem is None and findings:
        return findings
    return [finding(way.failed, way.check, f"a transfer {way.between} failed: {ran.ending}", way.action)]


# What follows runs in the child processes.


class HostMemory:
    """Memory that an engine can register. It is zero until something is written."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(num_bytes)
        self.address = ctypes.addressof(self._buffer)
        self.region = (self.address, num_bytes)

    def fill(self, content: bytes) -> None:
        """Writes `content` to the start."""
        ctypes.memmove(self.address, content, len(content))

    def read(self, num_bytes: int) -> bytes:
        """Returns the first bytes."""
        return self._buffer.raw[:num_bytes]


class NpuMemory:
    """The same on an NPU, allocated like the staging buffer. Makes the NPU the current one of the calling thread."""

    def __init__(self, num_bytes: int, device: int, room_before: int = 0) -> None:
        """`room_before`: bytes of the region before those that `address`, `fill` and `read` are about."""
        import torch
        import torch_npu  # noqa: F401 - makes torch.npu

        from vllm_ascend_pd.device.npu import NpuDevice

        torch.npu.set_device(device)
        whole = NpuDevice().allocate(room_before + num_bytes)
        self._torch, self._tensor = torch, whole[room_before:].zero_()
        torch.npu.synchronize()
        self.address: int = self._tensor.data_ptr()
        self.region = (whole.data_ptr(), room_before + num_bytes)

    def fill(self, content: bytes) -> None:
        buffer = self._torch.frombuffer(bytearray(content), dtype=self._torch.uint8)
        self._tensor[: len(content)].copy_(buffer)
        self._torch.npu.synchronize()

    def read(self, num_bytes: int) -> bytes:
        return bytes(self._tensor[:num_bytes].cpu().numpy())


def main() -> Iterator[Finding]:
    way = msgspec.json.decode(sys.argv[1], type=Way)
    spawning = multiprocessing.get_context("spawn")
    pipe, theirs = spawning.Pipe()
    spawning.Process(target=receive, args=(way, theirs, os.getpid()), daemon=True).start()
    theirs.close()  # so that `recv` fails when the receiver ends
    memory, engine = _start(way, way.source)
    memory.fill(_payload(way))
    try:
        receiver = pipe.recv()
        first = connect(engine, memory.address, receiver)
        seconds, pieces = write(engine, memory.address, receiver, way)
        costs = [
            cost(engine, memory.address, receiver, f"descriptors.{way.check.removeprefix(WRITE)}", way.num_bytes, size)
            for size in way.descriptor_bytes
        ]
        pipe.send("look")
        wrong, place = pipe.recv()
    except EOFError:
        raise SystemExit("the receiving process ended") from None
    engine.close()
    yield from (_verdict(way, wrong, place, seconds, pieces, first), *costs)


def receive(way: Way, pipe: Connection, parent: int) -> None:
    """Runs in the receiving process. Says where its memory is, and then how many bytes are wrong, and the first one."""
    end_with(parent)
    memory, engine = _start(way, way.destination, way.room_before)
    pipe.send((engine.session, memory.address))
    pipe.recv()
    pipe.send(compare(memory.read(way.num_bytes + GUARD_BYTES), _payload(way) + bytes(GUARD_BYTES)))
    engine.close()


def _start(way: Way, device: int | None, room_before: int = 0) -> tuple[HostMemory | NpuMemory, TransferEngine]:
    size = way.num_bytes + GUARD_BYTES
    memory = HostMemory(size) if device is None else NpuMemory(size, device, room_before)
    engine = TransferEngine(way.host, way.protocol, TransferLimits.over(way.protocol))
    engine.register([memory.region])
    return memory, engine


def _payload(way: Way) -> bytes:
    return random.Random(way.seed).randbytes(way.num_bytes)


def compare(memory: bytes, wanted: bytes) -> tuple[int, int]:
    """Returns the number of wrong bytes and the place of the first one, -1 if all are right."""
    if memory == wanted:
        return 0, -1
    wrong = [place for place, (one, other) in enumerate(zip(memory, wanted, strict=True)) if one != other]
    return len(wrong), wrong[0]


def _verdict(
    way: Way, wrong: int, place: int, seconds: float, pieces: int, first: Mapping[str, int | float]
) -> Finding:
    if wrong:
        found = f"{wrong} of {way.num_bytes} bytes {way.between} arrived wrong, the first at {place}, without an error"
        return error(way.check, found, "do not use this Mooncake: install the version that requirements/ names")
    speed = way.num_bytes / max(seconds, 1e-9)
    size = f"{way.num_bytes / 2**20:g} MiB in {pieces} pieces"
    found = f"{size} {way.between}, every byte right: {speed / 1e9:.3g} GB/s"
    found += f"; the first connection took {first['first_connection_seconds']:.3g} s"
    if "first_connection_streams" in first:
        found += f" and {first['first_connection_streams']} streams"
    figures = {"bytes": way.num_bytes, "seconds": round(seconds, 6), "bytes_per_second": round(speed)}
    return ok(way.check, found, "", **figures, **first)


def connect(engine: TransferEngine, start: int, receiver: Receiver) -> dict[str, int | float]:
    """Writes a first byte, which connects. Returns figures: what that took, in seconds and, on an NPU, in streams."""
    before, began = ascend.streams_left(), time.monotonic()
    engine.write(receiver[0], [start], [receiver[1]], [1])
    figures: dict[str, int | float] = {"first_connection_seconds": round(time.monotonic() - began, 6)}
    if before is not None and (after := ascend.streams_left()) is not None:
        figures["first_connection_streams"] = before - after
    return figures


def write(engine: TransferEngine, start: int, receiver: Receiver, way: Way) -> tuple[float, int]:
    """Returns how many seconds the write took, and the number of its descriptors. Call `connect` before."""
    offsets = range(0, way.num_bytes, PIECE_BYTES)
    lengths = [min(PIECE_BYTES, way.num_bytes - offset) for offset in offsets]
    sources, destinations = [start + o for o in offsets], [receiver[1] + o for o in offsets]
    began = time.monotonic()
    engine.write(receiver[0], sources, destinations, lengths)
    return time.monotonic() - began, len(lengths)


def cost(engine: TransferEngine, start: int, receiver: Receiver, check: str, num_bytes: int, size: int) -> Finding:
    """Measures what a descriptor of `size` bytes of `num_bytes` takes. They are in no order, as the blocks of a cache.

    The batches are made here, because the engine would cut long descriptors to divide them among connections.
    """
    offsets = [place * size for place in range(num_bytes // size)]
    random.Random(size).shuffle(offsets)
    del offsets[_BATCH:]
    batch = (
        array("q", [start + offset for offset in offsets]),
        array("q", [receiver[1] + offset for offset in offsets]),
        [size] * len(offsets),
    )
    batches, began = 0, time.monotonic()
    while (elapsed := time.monotonic() - began) < _MEASURED_S or not batches:
        engine.write_batches(receiver[0], [batch])
        batches += 1
    seconds = elapsed / (batches * len(offsets))
    speed = size / max(seconds, 1e-9)
    return ok(
        f"{check}.{size}",
        f"descriptors of {size >> 10} KiB: {seconds * 1e6:.1f} us each, {speed / 1e9:.3g} GB/s",
        protocol=engine.transport.protocol,
        bytes=size,
        seconds=round(seconds, 9),
        bytes_per_second=round(speed),
    )
