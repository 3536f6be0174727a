# SPDX-License-Identifier: Apache-2.0
"""A transfer engine in the test's process, and a process that receives what it writes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("mooncake.engine")

from vllm_ascend_pd.transport.batches import MIB, TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError

LIMITS = TransferLimits(timeout_s=2)
BUFFER_BYTES = 16 * MIB

RECEIVER = """
import ctypes, sys
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.batches import TransferLimits
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

    def __init__(self, limits: TransferLimits = LIMITS) -> None:
        self.engine = TransferEngine("127.0.0.1", "tcp", limits)
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
