# SPDX-License-Identifier: Apache-2.0
"""A process with a transfer engine of ours over protocol `ascend`: commands on standard input, one JSON list per line.

It answers each with one line of JSON: the result.
"""

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

import torch

import cann_on_host
from vllm_ascend_pd.device.npu import NpuDevice
from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError

SIZE = 2 << 20


class Write:
    """One write, on a thread of its own."""

    def __init__(self, engine: TransferEngine, session: str, batch: Any, allowed: bool) -> None:
        self.asked = False  # for leave to begin
        self.outcome = ""
        self.may_arrive = False
        self.begun = time.monotonic()
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._engine, self._session, self._batch, self._allowed = engine, session, batch, allowed
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> list[Any]:
        self._thread.join()
        return [self.outcome, self.seconds, self.may_arrive, self.cpu_seconds]

    def _run(self) -> None:
        try:
            self._engine.write_batches(self._session, [self._batch], self._may_begin)
            outcome = "arrived"
        except TransferError as error:
            outcome, self.may_arrive = error.reason, error.may_arrive
        self.seconds, self.cpu_seconds = time.monotonic() - self.begun, time.thread_time()
        self.outcome = outcome

    def _may_begin(self) -> bool:
        self.asked = True
        return self._allowed


class Peer:
    def __init__(self) -> None:
        torch.npu.set_device(1)  # decode has the first one, and there are no transfers inside an NPU
        self.memory = NpuDevice().allocate(SIZE)
        self.writes: dict[str, Write] = {}

    def start(self, timeout_s: float) -> None:
        self.engine = TransferEngine("127.0.0.1", "ascend", TransferLimits(timeout_s=timeout_s))
        self.engine.register([(self.memory.data_ptr(), SIZE)])

    def put(self, text: str) -> None:
        """Sets the beginning of the memory."""
        ctypes.memmove(self.memory.data_ptr(), text.encode(), len(text))

    def begin(self, name: str, session: str, address: int, nbytes: int, pieces: int = 1, allowed: bool = True) -> None:
        """Begins to write the beginning of the memory, in that many descriptors."""
        here = self.memory.data_ptr()
        offsets = [piece * nbytes for piece in range(pieces)]
        batch = ([here + offset for offset in offsets], [address + offset for offset in offsets], [nbytes] * pieces)
        self.writes[name] = Write(self.engine, session, batch, allowed)

    def wait(self, name: str) -> list[Any]:
        """Returns how the write ended, after how many seconds, whether bytes may still arrive, and CPU seconds."""
        return self.writes[name].wait()

    def asked(self) -> list[str]:
        """Returns the number of writes that have asked whether they may begin."""
        return sorted(name for name, write in self.writes.items() if write.asked)

    def stream(self, session: str, address: int, seconds: float) -> list[float]:
        """Writes again and again, and returns how long each write took."""
        taken = []
        end = time.monotonic() + seconds
        while (begun := time.monotonic()) < end:
            self.engine.write(session, [self.memory.data_ptr()], [address], [4096])
            taken.append(time.monotonic() - begun)
        return taken

    def counters(self) -> dict[str, int]:
        return cann_on_host.counters()


if __name__ == "__main__":
    peer = Peer()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(["answer", getattr(peer, name)(*arguments)]), flush=True)
    os._exit(0)  # Mooncake's own threads may hang in a transfer
