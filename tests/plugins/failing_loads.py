# SPDX-License-Identifier: Apache-2.0
"""Mooncake's store, which vllm-ascend's AscendStore uses, with loads that fail. On emulated NPUs only: their memory is
the host's."""

import ctypes
from pathlib import Path
from typing import Any


def failing_in(file: Path) -> list[int]:
    """Returns the numbers of a prompt's blocks that cannot be loaded, which are in `file`. It may be missing."""
    return [int(number) for number in file.read_text().split()] if file.is_file() else []


def fail_loads(file: Path) -> None:
    """Leaves other KV in blocks whose numbers are in `file`, of those that are loaded at once."""
    from mooncake.store import MooncakeDistributedStore

    load = MooncakeDistributedStore.batch_get_into_multi_buffers

    def load_some(
        self: Any, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], *others: Any
    ) -> list[int]:
        results = list(load(self, keys, addresses, sizes, *others))
        for number in failing_in(file):
            if number < len(keys):
                for address, size in zip(addresses[number], sizes[number], strict=True):
                    ctypes.memset(address, 0x3C, size)
                results[number] = -1
        return results

    MooncakeDistributedStore.batch_get_into_multi_buffers = load_some
