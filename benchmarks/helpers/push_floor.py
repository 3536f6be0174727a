# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/push.py: the same bytes between two processes by Mooncake's engine alone, as it is by default."""

import time
from typing import Any

import torch

from harness.rank_hosts import Rank
from vllm_ascend_pd.device.base import aligned_buffer

HOST = "127.0.0.1"
PATIENCE_S = 60.0
PAGE = 4096
BATCH = 512
"""Descriptors in one call: of thousands, Mooncake's queue refuses some."""


class Floor:
    """Two processes with `num_bytes` each, one of which writes to the other by Mooncake."""

    def __init__(self, num_bytes: int) -> None:
        self._from, self._to = (Rank(FloorRank, num_bytes, device="cpu") for _ in range(2))
        for rank in (self._from, self._to):
            rank.receive(PATIENCE_S)
        self._session, self._address = self._to.call("where")
        self._from.call("fill", 1)

    def mooncake(self, num_bytes: int, descriptor_bytes: int) -> float:
        """Returns the seconds for `num_bytes`, in calls of up to `BATCH` descriptors."""
        return float(self._from.call("write", self._session, self._address, num_bytes, descriptor_bytes))

    def check(self, num_bytes: int) -> None:
        """Raises RuntimeError unless the bytes have arrived; then clears them."""
        if self._to.call("checksum", num_bytes) != self._from.call("checksum", num_bytes):
            raise RuntimeError("other bytes arrived than were sent")
        self._to.call("fill", 0)

    def close(self) -> None:
        for rank in (self._from, self._to):
            rank.stop()
        if left := [what for rank in (self._from, self._to) for what in rank.stopped()]:
            raise RuntimeError(f"the processes left {left}")


class FloorRank:
    """The program of either process."""

    def __init__(self, num_bytes: int) -> None:
        from mooncake.engine import TransferEngine

        self._buffer = aligned_buffer(num_bytes, PAGE, "cpu")
        self._engine: Any = TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake did not start")
        if self._engine.register_memory(self._buffer.data_ptr(), num_bytes) != 0:
            raise RuntimeError("Mooncake did not register the memory")

    def where(self) -> tuple[str, int]:
        return f"{HOST}:{self._engine.get_rpc_port()}", self._buffer.data_ptr()

    def fill(self, seed: int) -> None:
        """Fills the memory with random bytes, or with zeros for 0."""
        words = self._buffer.view(torch.int64)
        if seed:
            words.random_(generator=torch.Generator().manual_seed(seed))
        else:
            words.zero_()

    def checksum(self, num_bytes: int) -> tuple[int, int]:
        words = self._buffer[:num_bytes].view(torch.int64)
        return int(words.sum()), int((words * torch.arange(1, len(words) + 1)).sum())

    def write(self, session: str, address: int, num_bytes: int, descriptor_bytes: int) -> float:
        offsets = range(0, num_bytes, descriptor_bytes)
        begun = time.monotonic()
        for first in range(0, len(offsets), BATCH):
            part = offsets[first : first + BATCH]
            sources = [self._buffer.data_ptr() + offset for offset in part]
            destinations = [address + offset for offset in part]
            lengths = [min(descriptor_bytes, num_bytes - offset) for offset in part]
            if self._engine.batch_transfer_sync_write(session, sources, destinations, lengths) != 0:
                raise RuntimeError(f"Mooncake refused {len(part)} descriptors of {descriptor_bytes} bytes")
        return time.monotonic() - begun

    def stop(self, reusable: bool) -> list[str]:
        self._engine.unregister_memory(self._buffer.data_ptr())
        return []
