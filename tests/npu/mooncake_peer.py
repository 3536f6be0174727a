# SPDX-License-Identifier: Apache-2.0
"""A process with one engine of Mooncake's wheel for NPUs: `mooncake_peer.py`, then commands, one JSON list per line.

It answers each with one line of JSON: the result. Torch is not loaded: memory comes from the runtime.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "cann_on_host"))
import cann_on_host

cann_on_host.activate()

from mooncake.engine import TransferEngine  # noqa: E402 - needs the libraries that activate() loads

MIB = 1 << 20
acl = ctypes.CDLL(str(cann_on_host.library_folder() / "libascendcl.so"))


def allocate(nbytes: int) -> int:
    """Device memory that begins at a multiple of 2 MiB."""
    block = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(block), ctypes.c_size_t(nbytes + 2 * MIB), 0) == 0
    assert block.value is not None
    return -(-block.value // (2 * MIB)) * 2 * MIB


class Engine:
    def __init__(self) -> None:
        assert acl.aclrtSetDevice(0) == 0
        self.mooncake = TransferEngine()
        self.memory = allocate(8 * MIB)
        self.others: list[Any] = []  # engines

    def start(self) -> list[Any]:
        code = self.mooncake.initialize("127.0.0.1", "P2PHANDSHAKE", "ascend", "")
        code = code or self.mooncake.batch_register_memory([self.memory], [4 * MIB])
        return [code, f"127.0.0.1:{self.mooncake.get_rpc_port()}", self.memory, os.getpid()]

    def more(self) -> list[Any]:
        """Starts another engine. Returns its session, and the address of memory of its own."""
        engine, memory = TransferEngine(), allocate(8 * MIB)
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "ascend", "") == 0
        assert engine.batch_register_memory([memory], [4 * MIB]) == 0
        self.others.append(engine)
        return [f"127.0.0.1:{engine.get_rpc_port()}", memory]

    def get_at(self, address: int, nbytes: int) -> str:
        return ctypes.string_at(address, nbytes).decode("latin-1")

    def get(self, offset: int, nbytes: int) -> str:
        return ctypes.string_at(self.memory + offset, nbytes).decode("latin-1")


if __name__ == "__main__":
    engine = Engine()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(["answer", getattr(engine, name)(*arguments)]), flush=True)
    os._exit(0)  # Mooncake's own threads may hang in a transfer
