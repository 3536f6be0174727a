# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/memory.py: a real prefill rank that counts what it registers with Mooncake."""

from unittest.mock import patch

from harness.rank_programs import PrefillRank
from vllm_ascend_pd.core.caches import merge


class CountingRank(PrefillRank):
    def __post_init__(self) -> None:
        from mooncake import engine as mooncake

        self.sizes = sizes = {}  # of the regions that Mooncake has taken, by address

        class CountingEngine(mooncake.TransferEngine):  # type: ignore[misc]
            def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
                code = int(super().batch_register_memory(addresses, lengths))
                if code == 0:
                    sizes.update(zip(addresses, lengths, strict=True))
                return code

        with patch.object(mooncake, "TransferEngine", CountingEngine):
            super().__post_init__()

    def staging_bytes(self) -> int:
        """Bytes registered beside the caches."""
        caches = merge(self.registered.regions())
        missing = [address for address, size in caches if self.sizes.get(address) != size]
        if missing:
            raise RuntimeError(f"{len(missing)} regions of the caches are not registered")
        return sum(self.sizes.values()) - sum(size for _, size in caches)

    def allocated_bytes(self) -> int:
        """Bytes of the device's memory beside the caches, as torch counts it; 0 without a device."""
        if self.on == "cpu":
            return 0
        import torch

        caches = {
            part.untyped_storage().data_ptr(): part.untyped_storage() for kv in self.caches.values() for part in kv
        }
        return int(torch.npu.memory_allocated()) - sum(storage.nbytes() for storage in caches.values())
