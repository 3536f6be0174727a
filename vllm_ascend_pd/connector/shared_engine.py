# SPDX-License-Identifier: Apache-2.0
"""The Mooncake engine that vllm-ascend's connectors share, and this package with them, below a MultiConnector.

Two engines of a process cannot both register the KV caches. HCCL refuses memory that overlaps other registered memory
of the process without being equal to it, and older versions refuse equal memory, too (global_mem_manager.cc,
`CheckOverlapAndInsert`). Within one engine Mooncake refuses both (transfer_engine_impl.cpp). vllm-ascend has one object
for this, `global_te`: whoever registers the caches first does so for all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm_ascend_pd.core.regions import Region
from vllm_ascend_pd.transport.existing_engine import ExistingEngine

_MODULE = "vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine"

_DEFAULTS = {
    "ASCEND_CONNECT_TIMEOUT": "10000",
    "ASCEND_THREAD_POOL_SIZE": "8",
    "ASCEND_TRANSFER_TIMEOUT": "10000",
    "MC_TRANSFER_TIMEOUT": "30",
}
"""Mooncake's own, in transfer_executor_base.h, slice_dispatcher.cpp and transfer_engine_py.cpp."""


class SharedEngine(ExistingEngine):
    """vllm-ascend's `global_te`."""

    def __init__(self, global_te: Any) -> None:
        self._global_te = global_te

    @classmethod
    def find(cls, protocol: str) -> SharedEngine | None:
        """None unless `protocol` is "ascend" and a connector of vllm-ascend that uses Mooncake is loaded here."""
        if protocol != "ascend":
            return None
        global_te = getattr(sys.modules.get(_MODULE), "global_te", None)
        return None if global_te is None else cls(global_te)

    def export_settings(self) -> None:
        """Puts the settings that an engine which runs already has into the environment, where they are missing: what
        is set from now on has no effect on it."""
        if self._global_te.transfer_engine is not None:
            for name, value in _DEFAULTS.items():
                os.environ.setdefault(name, value)

    def start(self, host: str) -> Any:
        """The Mooncake engine, started at `host` unless it runs already. Raises RuntimeError if it does not start."""
        return self._global_te.get_transfer_engine(host, None)

    def register_caches(self, regions: Sequence[Region]) -> None:
        """Registers the KV caches of this process, unless another connector has. They stay registered.

        Raises RuntimeError if Mooncake refuses them.
        """
        self._global_te.register_buffer([address for address, _ in regions], [size for _, size in regions])
