# SPDX-License-Identifier: Apache-2.0
"""A process with one `TransferEngine` of this package: `transfer_peer.py`, then commands, one JSON list per line.

It answers each with one line of JSON: the result, or `{"error": ...}`.
"""

import ctypes
import json
import os
import sys
from typing import Any

import msgspec

from vllm_ascend_pd.transport.batches import TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.writer import TransferError

MIB = 1 << 20


class Peer:
    def start(self, protocol: str) -> dict[str, Any]:
        """Starts an engine with 2 MiB of memory: an NPU's for `ascend`, else the host's."""
        if protocol == "ascend":
            import torch
            import torch_npu  # noqa: F401 - makes torch.npu

            torch.npu.set_device(0)
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
        ctypes.memmove(self.address, text.encode(), len(text))

    def get(self, nbytes: int) -> str:
        return ctypes.string_at(self.address, nbytes).decode("latin-1")

    def write(self, session: str, address: int, nbytes: int) -> None:
        self.engine.write(session, [self.address], [address], [nbytes])

    def setting(self, name: str) -> str | None:
        return os.environ.get(name)

    def adxl_transfers(self) -> int:
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
