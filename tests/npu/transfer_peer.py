# SPDX-License-Identifier: Apache-2.0
"""A process with one `TransferEngine` of this package: `transfer_peer.py`, then commands, one JSON list per line.

It answers each with one line of JSON: the result, or `{"error": ...}`.
"""

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

import msgspec

from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError

MIB = 1 << 20


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
        self.writes: dict[str, Write] = {}

    def start(self, protocol: str, device: int = 0) -> dict[str, Any]:
        """Starts an engine with 2 MiB of memory: an NPU's for `ascend`, else the host's."""
        if protocol == "ascend":
            import torch
            import torch_npu  # noqa: F401 - makes torch.npu

            torch.npu.set_device(device)
            self.block = torch.zeros(4 * MIB, dtype=torch.uint8, device="npu")
            torch.npu.synchronize()
            begin = self.block.data_ptr()
        else:
            self.block = ctypes.create_string_buffer(4 * MIB)
            begin = ctypes.addressof(self.block)
        self.address = -(-begin // (2 * MIB)) * 2 * MIB
        self.engine = TransferEngine("127.0.0.1", protocol, TransferLimits(timeout_s=1.0))
        self.engine.register([(self.address, 2 * MIB)])
        return {
            "session": self.engine.session,
            "address": self.address,
            "transport": msgspec.to_builtins(self.engine.transport),
        }

    def put(self, text: str) -> None:
        """Sets the beginning of the memory."""
        ctypes.memmove(self.address, text.encode(), len(text))

    def get(self, nbytes: int) -> str:
        return ctypes.string_at(self.address, nbytes).decode("latin-1")

    def write(self, session: str, address: int, nbytes: int) -> None:
        self.engine.write(session, [self.address], [address], [nbytes])

    def begin(self, name: str, session: str, address: int, nbytes: int, pieces: int = 1, allowed: bool = True) -> None:
        """Begins to write the beginning of the memory, in that many descriptors."""
        offsets = [piece * nbytes for piece in range(pieces)]
        places = ([begin + offset for offset in offsets] for begin in (self.address, address))
        self.writes[name] = Write(self.engine, session, (*places, [nbytes] * pieces), allowed)

    def wait(self, name: str) -> list[Any]:
        """Returns how the write ended, after how many seconds, whether bytes may still arrive, and CPU seconds."""
        return self.writes[name].wait()

    def asked(self) -> list[str]:
        """Returns the writes that have asked whether they may begin."""
        return sorted(name for name, write in self.writes.items() if write.asked)

    def stream(self, session: str, address: int, seconds: float) -> list[float]:
        """Writes again and again, and returns how long each write took."""
        taken = []
        end = time.monotonic() + seconds
        while (begun := time.monotonic()) < end:
            self.write(session, address, 4096)
            taken.append(time.monotonic() - begun)
        return taken

    def setting(self, name: str) -> str | None:
        return os.environ.get(name)

    def transfers(self) -> int:
        """Returns the number of CANN's transfer calls so far."""
        import cann_on_host

        return cann_on_host.counters()["adxl_transfers"]


def answer(peer: Peer, name: str, *arguments: Any) -> Any:
    try:
        return getattr(peer, name)(*arguments)
    except TransferError as error:
        return {"error": error.reason}


if __name__ == "__main__":
    peer = Peer()
    for line in sys.stdin:
        print(json.dumps(["answer", answer(peer, *json.loads(line))]), flush=True)
    os._exit(0)  # Mooncake's own threads may hang in a transfer
