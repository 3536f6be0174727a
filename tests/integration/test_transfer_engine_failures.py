# SPDX-License-Identifier: Apache-2.0
"""The real Mooncake engine when a receiver is dead or stopped, a call of Mooncake fails, or its queue is short."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
from transfer_receiver import *  # noqa: F403
from transfer_receiver import BUFFER_BYTES, LIMITS, Receiver, Source, elapsed_until_error

from harness.rank_hosts import stop
from harness.waiting import wait_for
from vllm_ascend_pd.transport.writer import TransferError


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
    arrived = written(receiver, offsets)
    assert len(arrived) <= 16
    time.sleep(2)
    assert written(receiver, offsets) == arrived


def written(receiver: Receiver, offsets: list[int]) -> list[int]:
    """Those of `offsets` in the receiver's memory that are not 0 any more."""
    memory = receiver.read(0, offsets[-1] + 1)
    return [offset for offset in offsets if memory[offset]]


class Raising:
    """Mooncake's engine with one method that raises. It counts probes."""

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
    """An error of Mooncake's binding, or of memory, does not show which bytes were sent."""
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
    """Six threads, and what they leave while the receiver is stopped, do not fill it: a refusal may end all writes."""
    program = """
import ctypes, sys, threading
from vllm_ascend_pd.transport.engine import TransferEngine, TransferError
from vllm_ascend_pd.transport.batches import TransferLimits
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
