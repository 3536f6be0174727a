# SPDX-License-Identifier: Apache-2.0
"""The Mooncake engine that vllm-ascend's connectors share, and this package with them, below a MultiConnector.

Two engines of one process cannot both register the KV caches:

- HCCL refuses memory that overlaps other registered memory of the process, unless both are equal. Older versions refuse
  equal memory, too (global_mem_manager.cc, `CheckOverlapAndInsert`).
- Within one engine, Mooncake refuses both (transfer_engine_impl.cpp).

vllm-ascend has one object for this, `global_te`. The connector that registers the caches first does it for all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm_ascend_pd.core.caches import Region
from vllm_ascend_pd.transport.engine import ExistingEngine

_MODULE = "vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine"

_DEFAULTS = {
    "ASCEND_CONNECT_TIMEOUT": "10000",
    "ASCEND_THREAD_POOL_SIZE": "8",
    "ASCEND_TRANSFER_TIMEOUT": "10000",
    "MC_TRANSFER_TIMEOUT": "30",
}
"""Mooncake's defaults, from transfer_executor_base.h, slice_dispatcher.cpp and transfer_engine_py.cpp."""


class SharedEngine(ExistingEngine):
    """vllm-ascend's `global_te`."""

    def __init__(self, global_te: Any) -> None:
        self._global_te = global_te

    @classmethod
    def find(cls, protocol: str) -> SharedEngine | None:
        """Returns the shared engine if one of vllm-ascend's connectors that use Mooncake is loaded in this process.

        None otherwise, and for every protocol but "ascend".
        """
        if protocol != "ascend":
            return None
        global_te = getattr(sys.modules.get(_MODULE), "global_te", None)
        return None if global_te is None else cls(global_te)

    def export_settings(self) -> None:
        """Puts the settings of an engine that already runs into the environment, where they are missing.

        Settings that are exported later have no effect on that engine.
        """
        if self._global_te.transfer_engine is not None:
            for name, value in _DEFAULTS.items():
                os.environ.setdefault(name, value)

    def start(self, host: str) -> Any:
        """Returns the Mooncake engine, started at `host` unless it runs. Raises RuntimeError if it does not start."""
        return self._global_te.get_transfer_engine(host, None)

    def register_caches(self, regions: Sequence[Region]) -> None:
        """Registers the KV caches of this process, unless another connector has. They stay registered.

        Raises RuntimeError if Mooncake refuses them.
        """
        self._global_te.register_buffer([address for address, _ in regions], [size for _, size in regions])
