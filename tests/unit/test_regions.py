# SPDX-License-Identifier: Apache-2.0
"""Memory regions: how they are merged, and which ones protocol `ascend` refuses."""

import pytest
import torch

from vllm_ascend_pd.core.ascend import DOCUMENTED_DEVICE_BYTES, MAX_REGIONS, aligned, covered, doubt, merge, refusal
from vllm_ascend_pd.core.caches import RegisteredCaches, describe
from vllm_ascend_pd.core.layout import LayerSpec

MIB = 1 << 20
A2, A3, OTHER = "Ascend910B1", "Ascend910_9382", "Ascend950PR_9599"


def caches_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> RegisteredCaches:
    layers = {f"layers.{n}": pair for n, pair in enumerate(pairs)}
    spec = LayerSpec(group=0, block_size=16, heads=2, total_heads=2)
    return describe(layers, dict.fromkeys(layers, spec), heads_first=False)


def cut(storage: torch.Tensor, offset: int) -> torch.Tensor:
    """A cache of 4 blocks of 16 tokens and 2 heads: 4096 bytes, `offset` bytes into the storage."""
    return storage[offset // 4 : offset // 4 + 1024].view(4, 16, 2, 8)


def test_overlapping_regions_become_one_and_adjacent_ones_where_that_is_allowed() -> None:
    regions = [(30, 5), (0, 10), (10, 10), (2, 3), (34, 2)]
    assert merge(regions) == [(0, 10), (10, 10), (30, 6)]
    assert merge(regions, gap=0) == [(0, 20), (30, 6)]
    assert merge(regions, gap=9) == [(0, 20), (30, 6)]
    assert merge(regions, gap=10) == [(0, 36)]
    with pytest.raises(ValueError, match="0 bytes"):
        merge([(1, 0)])


def test_a_region_that_another_contains_is_covered() -> None:
    assert covered((4, 6), [(0, 2), (4, 6)])
    assert not covered((4, 7), [(0, 4), (4, 6)])


def test_caches_of_one_storage_with_small_gaps_are_one_region() -> None:
    storage = torch.zeros(40 * 1024 // 4)
    caches = caches_of((cut(storage, 0), cut(storage, 4096)), (cut(storage, 12 * 1024), cut(storage, 24 * 1024)))
    start = storage.data_ptr()
    assert caches.regions() == [(start, 16 * 1024), (start + 24 * 1024, 4096)]


def test_caches_of_different_storages_are_never_one_region() -> None:
    """They may be different allocations, even where one begins at the end of the other."""
    memory = bytearray(8192)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=1024, offset=at) for at in (0, 4096))
    assert first.untyped_storage().data_ptr() + 4096 == second.untyped_storage().data_ptr()
    caches = caches_of((cut(first, 0), cut(second, 0)))
    assert caches.regions() == [(first.data_ptr(), 4096), (second.data_ptr(), 4096)]


def test_a_region_begins_at_the_multiple_of_2_mib_before_it_within_its_storage() -> None:
    assert aligned((4 * MIB + 64, 100), 3 * MIB) == (4 * MIB, 164)
    assert aligned((4 * MIB + 64, 100), 4 * MIB) == (4 * MIB, 164)
    assert aligned((4 * MIB, 100), 3 * MIB) == (4 * MIB, 100)
    assert aligned((5 * MIB, 100), 4 * MIB + 1) == (5 * MIB, 100), "the memory before the storage may be anyone's"


def test_caches_behind_a_padding_are_registered_with_it() -> None:
    whole = torch.zeros((6 * MIB) // 4)
    start = -whole.data_ptr() % (2 * MIB)
    caches = caches_of((cut(whole, start + 2 * MIB + 1024), cut(whole, start + 2 * MIB + 64 * 1024)))
    assert caches.regions() == [(whole.data_ptr() + start + 2 * MIB, 64 * 1024 + 4096)]


def test_regions_begin_at_a_multiple_of_2_mib() -> None:
    assert refusal([(4 * MIB, 100)], A2) is None
    assert "multiple of 2 MiB" in (refusal([(4 * MIB, 100), (8 * MIB + 64, 100)], A2) or "")


def test_a_process_registers_256_regions_at_most() -> None:
    regions = [(n * 4 * MIB, MIB) for n in range(MAX_REGIONS + 1)]
    assert refusal(regions[:-1], A2) is None
    assert refusal(regions, A2) == (
        "257 regions of memory, and HCCL takes 256 for each process: spread the model's layers over more ranks "
        "(--pipeline-parallel-size), or use a model with fewer KV cache tensors"
    )


@pytest.mark.parametrize(("chip", "limited"), [(A2, True), (A3, True), (OTHER, False), ("", False)])
def test_more_than_the_documented_50_gib_is_in_doubt_and_not_refused(chip: str, limited: bool) -> None:
    """An NPU of 64 GB gives its KV cache about 53 GiB, and HIXL does not check the limit."""
    half = DOCUMENTED_DEVICE_BYTES // 2
    assert doubt([(0, half), (half, half)], chip) is None
    assert refusal([(0, half), (half, half + 2 * MIB)], chip) is None
    reason = doubt([(0, half), (half, half + 2 * MIB)], chip)
    assert (reason is not None and "51202 MiB of device memory" in reason and chip in reason) == limited
