# SPDX-License-Identifier: Apache-2.0
"""The real Mooncake engine over TCP on the loopback interface, between real processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from harness.waiting import wait_for

pytest.importorskip("mooncake.engine")

from harness.rank_hosts import stop
from vllm_ascend_pd.core.plan import Descriptors
from vllm_ascend_pd.transport.batches import Batches
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.limits import MIB, TransferLimits
from vllm_ascend_pd.transport.writer import TransferError

LIMITS = TransferLimits(timeout_s=2)
BUFFER_BYTES = 16 * MIB

RECEIVER = """
import ctypes, sys
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.limits import TransferLimits
size = int(sys.argv[1])
buffer = ctypes.create_string_buffer(size)
engine = TransferEngine("127.0.0.1", "tcp", TransferLimits(timeout_s=2))
engine.register([(ctypes.addressof(buffer), size)])
print("READY", engine.session, ctypes.addressof(buffer), flush=True)
for line in sys.stdin:
    offset, length = map(int, line.split())
    print("BYTES", buffer.raw[offset:offset + length].hex(), flush=True)
engine.close()
print("CLOSED", flush=True)
"""


class Receiver:
    """A process with one registered buffer that others write to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, str(BUFFER_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.session, address = self.answer("READY")
        self.address = int(address)

    def answer(self, word: str) -> list[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            first, *rest = line.split() or [""]
            if first == word:
                return rest
        raise AssertionError(f"receiver ended without saying {word}")

    def read(self, offset: int, length: int) -> bytes:
        assert self.process.stdin is not None
        print(offset, length, file=self.process.stdin, flush=True)
        return bytes.fromhex(self.answer("BYTES")[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Source:
    """An engine in this process and the memory it sends from."""

    def __init__(self) -> None:
        self.engine = TransferEngine("127.0.0.1", "tcp", LIMITS)
        self.memory = ctypes.create_string_buffer(bytes(range(256)) * (BUFFER_BYTES // 256), BUFFER_BYTES)
        self.address = ctypes.addressof(self.memory)
        self.engine.register([(self.address, BUFFER_BYTES)])

    def write(self, receiver: Receiver, offset: int, length: int) -> None:
        self.engine.write(receiver.session, [self.address + offset], [receiver.address + offset], [length])


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.engine.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.kill()


def elapsed_until_error(source: Source, receiver: Receiver) -> float:
    started = time.monotonic()
    with pytest.raises(TransferError) as raised:
        source.write(receiver, 0, 4096)
    assert raised.value.session == receiver.session
    assert raised.value.retryable
    return time.monotonic() - started


def test_bytes_arrive(source: Source, receiver: Receiver) -> None:
    source.write(receiver, 1000, 3000)
    assert receiver.read(999, 3002) == b"\0" + source.memory.raw[1000:4000] + b"\0"


def test_descriptor_longer_than_the_limit_arrives(source: Source, receiver: Receiver) -> None:
    source.write(receiver, 0, BUFFER_BYTES)
    assert receiver.read(BUFFER_BYTES - 512, 512) == source.memory.raw[-512:]


def test_nothing_to_write(source: Source, receiver: Receiver) -> None:
    source.engine.write(receiver.session, [], [], [])
    with pytest.raises(ValueError, match="1 sources, 2 destinations"):
        source.engine.write(receiver.session, [1], [1, 2], [1])


def test_three_threads_with_5000_tiny_descriptors_each(source: Source, receiver: Receiver) -> None:
    count, size = 5000, 64
    errors: list[BaseException] = []

    def send(thread: int) -> None:
        offsets = [(thread * count + i) * size for i in range(count)]
        try:
            source.engine.write(
                receiver.session,
                [source.address + offset for offset in offsets],
                [receiver.address + offset for offset in offsets],
                [size] * count,
            )
        except TransferError as error:
            errors.append(error)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert receiver.read(0, 3 * count * size) == source.memory.raw[: 3 * count * size]


def test_no_batch_begins_once_the_leave_to_write_has_ended(source: Source, receiver: Receiver) -> None:
    per_batch = LIMITS.max_descriptors
    leave = iter([True, False])
    offsets = [64 * i for i in range(3 * per_batch)]
    copies = Descriptors(np.array(offsets), np.array(offsets), np.full(len(offsets), 64))
    batches = Batches.cut([copies], source.engine.limits).at([source.address], [receiver.address])
    with pytest.raises(TransferError, match="the lease ended") as error:
        source.engine.write_batches(receiver.session, batches, lambda: next(leave))
    assert (error.value.may_arrive, error.value.retryable) == (False, False)
    first = 64 * per_batch
    assert receiver.read(0, first) == source.memory.raw[:first]
    assert receiver.read(first, 2 * first) == bytes(2 * first)


def test_address_outside_the_registered_memory_is_refused(source: Source, receiver: Receiver) -> None:
    with pytest.raises(TransferError, match="refuses the addresses"):
        source.engine.write(receiver.session, [source.address], [receiver.address + BUFFER_BYTES], [64])
    source.write(receiver, 0, 64)  # and the session lives on
    assert receiver.read(0, 64) == source.memory.raw[:64]


def test_session_that_never_existed(source: Source) -> None:
    started = time.monotonic()
    with pytest.raises(TransferError, match="unreachable"):
        source.engine.write("127.0.0.1:1", [source.address], [4096], [64])
    assert time.monotonic() - started < 1


def test_dead_peer_fails_fast(source: Source, receiver: Receiver) -> None:
    source.write(receiver, 0, 64)
    receiver.kill()
    for _ in range(3):
        assert elapsed_until_error(source, receiver) < 1.5


def test_stopped_peer_is_bounded_and_blocks_nobody_else(source: Source, receiver: Receiver) -> None:
    other = Receiver()
    try:
        for peer in (receiver, other):
            source.write(peer, 0, 64)
        stop(receiver.process.pid)
        first = elapsed_until_error(source, receiver)
        assert LIMITS.timeout_s - 0.2 < first < LIMITS.timeout_s + 1.5

        hanging = threading.Thread(target=elapsed_until_error, args=(source, receiver))
        hanging.start()
        started = time.monotonic()
        source.write(other, 0, 4096)
        assert time.monotonic() - started < 0.5
        hanging.join(LIMITS.timeout_s + 1.5)
        assert not hanging.is_alive()

        receiver.process.send_signal(signal.SIGCONT)
        time.sleep(LIMITS.settle_s - LIMITS.timeout_s)
        source.write(receiver, 8192, 64)
        assert receiver.read(8192, 64) == source.memory.raw[8192:8256]
    finally:
        other.kill()


def test_stopped_peer_before_the_first_contact(source: Source, receiver: Receiver) -> None:
    stop(receiver.process.pid)
    assert elapsed_until_error(source, receiver) < LIMITS.timeout_s + 1


def test_failed_batch_stops_within_settle_time(source: Source, receiver: Receiver) -> None:
    """Of 512 descriptors to a stopped peer only those on the wire or next in line may still arrive."""
    source.write(receiver, BUFFER_BYTES - 64, 64)
    stop(receiver.process.pid)
    size = 16 * 1024
    offsets = [i * size for i in range(512)]
    with pytest.raises(TransferError):
        source.engine.write(
            receiver.session,
            [source.address + 1 + offset for offset in offsets],  # the first byte of each is not 0
            [receiver.address + offset for offset in offsets],
            [size - 1] * 512,
        )
    time.sleep(LIMITS.settle_s)
    receiver.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    arrived = sum(receiver.read(offset, 1) != b"\0" for offset in offsets)
    assert arrived <= 16
    time.sleep(2)
    assert sum(receiver.read(offset, 1) != b"\0" for offset in offsets) == arrived


class Raising:
    """Mooncake's engine, whose method of this name raises; probes are counted."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self._name, self.probes = engine, name, 0

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise MemoryError(f"{name}: no memory")
        self.probes += name == "send_probe"
        return getattr(self._engine, name)


@pytest.mark.parametrize("call", ["batch_transfer_async_write", "get_batch_transfer_status"])
def test_bytes_may_still_arrive_after_an_error_that_nobody_expects(
    source: Source, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Of Mooncake's binding, or of memory: nobody knows what has left."""
    source.write(receiver, 0, 4096)
    monkeypatch.setattr(source.engine._writer, "_mooncake", Raising(source.engine._engine, call))
    with pytest.raises(TransferError, match="no memory") as raised:
        source.write(receiver, 0, 4096)
    assert (raised.value.may_arrive, raised.value.retryable) == (True, False)
    healthy = Raising(source.engine._engine, "")
    monkeypatch.setattr(source.engine._writer, "_mooncake", healthy)
    monkeypatch.setattr(source.engine._reach, "_mooncake", healthy)
    source.write(receiver, 4096, 4096)
    assert healthy.probes == 1
    assert receiver.read(4096, 16) == bytes(range(16))


def test_a_session_is_probed_once_threads_start_again(
    source: Source, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(TransferError, match="can't start new thread") as raised:
            source.write(receiver, 0, 16)
        assert raised.value.retryable
        assert not raised.value.may_arrive
    source.write(receiver, 0, 16)
    assert receiver.read(0, 16) == bytes(range(16))


def test_short_queue_of_mooncakes_is_never_filled(receiver: Receiver) -> None:
    """Not by six threads, nor by what they leave while the receiver stands still: a refusal may end all writes."""
    program = """
import ctypes, sys, threading
from vllm_ascend_pd.transport.engine import TransferEngine, TransferError
from vllm_ascend_pd.transport.limits import TransferLimits
session, address, count = sys.argv[1], int(sys.argv[2]), 400
memory = ctypes.create_string_buffer(count)
engine = TransferEngine("127.0.0.1", "tcp", TransferLimits(timeout_s=1))
engine.register([(ctypes.addressof(memory), count)])
print("DESCRIPTORS", engine.limits.max_descriptors, flush=True)
def write(results):
    try:
        sources = list(range(ctypes.addressof(memory), ctypes.addressof(memory) + count))
        engine.write(session, sources, list(range(address, address + count)), [1] * count)
        results.append("arrived")
    except TransferError:
        results.append("failed")
for _ in sys.stdin:
    results = []
    threads = [threading.Thread(target=write, args=(results,)) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print("RESULTS", *results, flush=True)
"""
    others = {k: v for k, v in os.environ.items() if not k.startswith("MC_")}
    env = {**others, "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "28"}
    with subprocess.Popen(
        [sys.executable, "-c", program, receiver.session, str(receiver.address)],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as source:

        def answer(word: str) -> list[str]:
            assert source.stdout is not None
            return next(rest for first, *rest in map(str.split, source.stdout) if first == word)

        def write() -> set[str]:
            assert source.stdin is not None
            print(file=source.stdin, flush=True)
            return set(answer("RESULTS"))

        assert answer("DESCRIPTORS") == ["8"]
        wait_for(write, lambda results: results == {"arrived"}, 60)  # a busy machine may stand still for its second
        receiver.process.send_signal(signal.SIGSTOP)
        assert write() == {"failed"}
        receiver.process.send_signal(signal.SIGCONT)
        wait_for(write, lambda results: results == {"arrived"}, 60)
        _, errors = source.communicate()
        assert "queue-full" not in errors


def test_registering_again_and_closing() -> None:
    memory = ctypes.create_string_buffer(64 * 1024)
    address = ctypes.addressof(memory)
    engine = TransferEngine("127.0.0.1", "tcp", LIMITS)
    engine.register([(address, 4096), (address + 4096, 4096), (address + 2048, 1024)])
    engine.register([(address + 100, 100)])
    with pytest.raises(TransferError, match="overlaps"):
        engine.register([(address + 8000, 4096)])
    engine.close()
    engine.close()
    with pytest.raises(TransferError, match="closed"):
        engine.write("127.0.0.1:1", [address], [address], [1])


def test_receiver_closes_cleanly(source: Source, receiver: Receiver) -> None:
    source.write(receiver, 0, 64)
    output, _ = receiver.process.communicate(timeout=20)
    assert "CLOSED" in output
    assert receiver.process.returncode == 0


def test_mooncake_without_the_ascend_transport_starts_all_the_same() -> None:
    """Why an engine looks for the transport after it has started: this one would use TCP for the memory of NPUs."""
    program = """
from pathlib import Path
from mooncake.engine import TransferEngine
from vllm_ascend_pd.transport import ascend
code = TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "ascend", "")
print("RESULT", code, ascend.is_loaded(Path("/proc/self/maps").read_text()))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "RESULT 0 False" in result.stdout, result.stderr


def test_ascend_without_an_npu_is_refused() -> None:
    with pytest.raises(TransferError, match="torch_npu is not loaded: set transfer_protocol to tcp"):
        TransferEngine("127.0.0.1", "ascend", LIMITS)


def test_settings_are_made_before_mooncake_is_loaded_and_the_users_win() -> None:
    program = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mooncake.engine":
            print("LOADED", os.environ.get("MC_TRANSFER_TIMEOUT"), os.environ.get("MC_TCP_STATUS_TIMEOUT_SEC"))
sys.meta_path.insert(0, Watch())
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.limits import TransferLimits
engine = TransferEngine("127.0.0.1", "tcp", TransferLimits(timeout_s=20))
print("SETTLES", engine.limits.settle_s)
engine.close()
"""
    others = {k: v for k, v in os.environ.items() if not k.startswith("MC_")}
    for seconds, settle_s in (("7", 62), ("30", 92)):
        env = {**others, "MC_TCP_STATUS_TIMEOUT_SEC": seconds}
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=env)
        assert f"LOADED 21 {seconds}" in result.stdout, result.stderr
        assert f"SETTLES {settle_s}" in result.stdout, result.stderr
