# SPDX-License-Identifier: Apache-2.0
"""The real Mooncake engine over TCP on the loopback interface, between real processes: writes, memory and settings."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from transfer_receiver import *  # noqa: F403
from transfer_receiver import BUFFER_BYTES, LIMITS, Receiver, Source

from vllm_ascend_pd.core.plan import Descriptors
from vllm_ascend_pd.transport.batches import PagedWrite, TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError


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


def test_three_threads_with_5000_tiny_descriptors_each(receiver: Receiver) -> None:
    """Each waits until the queue has room. On a busy machine that may take seconds."""
    source = Source(TransferLimits(timeout_s=30))
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
    with closing(source.engine):
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
    write = PagedWrite([copies], source.engine.limits, [64 * len(offsets)])
    batches = write.at([([source.address], [receiver.address])])
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


def test_an_engine_that_could_not_register_its_memory_again_stays_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ctypes.create_string_buffer(4096)
    with closing(TransferEngine("127.0.0.1", "tcp", LIMITS)) as engine:
        engine.register([(ctypes.addressof(memory), 4096)])
        engine.suspend()

        def refuse(_: object) -> None:
            raise TransferError("127.0.0.1", "refused by the test", retryable=False)

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_register", refuse)
            for _ in range(2):
                with pytest.raises(TransferError, match="refused by the test"):
                    engine.resume()
        with pytest.raises(TransferError, match="sleeps"):
            engine.write("127.0.0.1:1", [0], [0], [1])
        engine.resume()
        assert engine._own == [ctypes.addressof(memory)]


def test_receiver_closes_cleanly(source: Source, receiver: Receiver) -> None:
    source.write(receiver, 0, 64)
    output, _ = receiver.process.communicate(timeout=20)
    assert "CLOSED" in output
    assert receiver.process.returncode == 0


def test_mooncake_without_the_ascend_transport_starts_all_the_same() -> None:
    """So an engine looks for the transport after its start: this one would use TCP for NPU memory."""
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
from vllm_ascend_pd.transport.batches import TransferLimits
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
