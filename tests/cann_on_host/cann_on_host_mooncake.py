# SPDX-License-Identifier: Apache-2.0
"""Mooncake's protocol `ascend` on the emulated NPU: TCP moves the bytes, the rules of `ascend` are checked."""

from __future__ import annotations

import bisect
import ctypes
import sys
from types import ModuleType

import cann_on_host

ALIGNMENT = 2 * 1024 * 1024
"""Device memory that is registered for transfers over HCCS begins at a multiple of 2 MiB (vllm-ascend aligns its KV
caches for this: `NPUModelRunner._allocate_kv_cache_tensors`)."""


def install(engine: ModuleType) -> None:
    """Replace `mooncake.engine.TransferEngine`."""

    class TransferEngine(engine.TransferEngine):  # type: ignore[misc,name-defined]
        _ascend = False

        def initialize(self, host: str, metadata: str, protocol: str, device_name: str) -> int:
            if protocol != "ascend":
                return int(super().initialize(host, metadata, protocol, device_name))
            device = ctypes.c_int32()
            if ctypes.CDLL("libascendcl.so").aclrtGetDevice(ctypes.byref(device)) != 0:
                return _refuse("initialize: no device is set in this thread")
            ctypes.CDLL(str(cann_on_host.library_folder() / "ascend_transport.so"))
            self._ascend = True
            self._regions: list[tuple[int, int]] = []
            return int(super().initialize(host, metadata, "tcp", ""))

        def register_memory(self, address: int, nbytes: int) -> int:
            return self.batch_register_memory([address], [nbytes])

        def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
            if self._ascend:
                for address, nbytes in zip(addresses, lengths, strict=True):
                    place = cann_on_host.place(address, nbytes)
                    if place not in ("device", "pinned host"):
                        # aclrtPointerGetAttributes does not know other memory (Mooncake issue 1406).
                        return _refuse(f"register {nbytes} bytes at {address:#x}: {place} memory")
                    if place == "device" and address % ALIGNMENT:
                        return _refuse(f"register {nbytes} bytes at {address:#x}: not a multiple of 2 MiB")
                self._regions = sorted([*self._regions, *zip(addresses, lengths, strict=True)])
            return int(super().batch_register_memory(list(addresses), list(lengths)))

        def unregister_memory(self, address: int) -> int:
            return self.batch_unregister_memory([address])

        def batch_unregister_memory(self, addresses: list[int]) -> int:
            if self._ascend:
                self._regions = [region for region in self._regions if region[0] not in set(addresses)]
            return int(super().batch_unregister_memory(list(addresses)))

        def transfer_sync_write(self, session: str, source: int, destination: int, nbytes: int) -> int:
            return self.batch_transfer_sync_write(session, [source], [destination], [nbytes])

        def batch_transfer_sync_write(
            self, session: str, sources: list[int], destinations: list[int], lengths: list[int]
        ) -> int:
            if self._ascend:
                for source, nbytes in zip(sources, lengths, strict=True):
                    if not self._is_registered(source, nbytes):
                        return _refuse(f"write {nbytes} bytes from {source:#x}: not registered here")
            return int(super().batch_transfer_sync_write(session, sources, destinations, lengths))

        def _is_registered(self, address: int, nbytes: int) -> bool:
            index = bisect.bisect(self._regions, (address, sys.maxsize)) - 1
            if index < 0:
                return False
            begin, length = self._regions[index]
            return address + nbytes <= begin + length

    engine.TransferEngine = TransferEngine  # type: ignore[attr-defined]


def _refuse(reason: str) -> int:
    print(f"[cann_on_host] Mooncake, protocol ascend: {reason}", file=sys.stderr, flush=True)
    return -1
