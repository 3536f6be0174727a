# SPDX-License-Identifier: Apache-2.0
"""Valid calls of the block ops, and random tensors for them."""

from typing import Any

import pytest
import torch

from vllm_ascend_pd.device import ops, ops_fallback


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Every bit pattern, NaNs included: the ops move bytes."""
    return torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


# The CPU's ops, and what an NPU without compiled kernels runs.
IMPLEMENTATIONS = pytest.mark.parametrize("impl", [ops, ops_fallback], ids=["ops", "fallback"])

GATHER: dict[str, Any] = {
    "caches": [torch.zeros(4, 64, dtype=torch.uint8)],
    "unit_offsets": torch.tensor([0, 192]),
    "unit_bytes": 64,
    "section_units": 1,
    "out": torch.zeros(128, dtype=torch.uint8),
    "out_offset": 0,
    "out_cache_stride": 0,
    "out_section_stride": 64,
}
SPLIT: dict[str, Any] = {k: v for k, v in GATHER.items() if k not in ("unit_bytes", "section_units")} | {
    "splits": 2,
    "tokens": 4,
    "row_bytes": 8,
}
INTERLEAVE: dict[str, Any] = {
    "src": torch.zeros(128, dtype=torch.uint8),
    "src_offset": 0,
    "src_rank_stride": 64,
    "out": torch.zeros(128, dtype=torch.uint8),
    "out_offset": 0,
    "ranks": 2,
    "tokens": 8,
    "row_bytes": 8,
}
SUM: dict[str, Any] = {
    "caches": [torch.zeros(4, 64, dtype=torch.uint8)],
    "unit_offsets": [torch.tensor([0, 192])],
    "entry_weights": [torch.zeros(2, 4, dtype=torch.int64)],
    "place_weights": [torch.zeros(2, dtype=torch.int64)],
    "heads": [2],
    "word_bytes": [4],
    "out": torch.zeros(4, dtype=torch.int64),
}
