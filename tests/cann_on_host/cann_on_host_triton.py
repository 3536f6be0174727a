# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of vLLM's that its model runner calls on the emulated NPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class SlotMappingKernel:
    """vLLM's Triton kernel `_compute_slot_mapping_kernel[grid](...)`, for the whole grid at once."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(
            num_tokens: int,
            max_num_tokens: int,
            query_start_loc: Tensor,
            positions: Tensor,
            block_table: Tensor,
            block_table_stride: int,
            block_size: int,
            slot_mapping: Tensor,
            *,
            TOTAL_CP_WORLD_SIZE: int,
            TOTAL_CP_RANK: int,
            CP_KV_CACHE_INTERLEAVE_SIZE: int,
            PAD_ID: int,
            BLOCK_SIZE: int,
        ) -> None:
            assert TOTAL_CP_WORLD_SIZE == 1, "context parallelism is not emulated"
            requests = grid[0] - 1  # the last program pads
            torch.ops.cann_on_host.slot_mapping(
                requests,
                num_tokens,
                max_num_tokens,
                query_start_loc,
                positions,
                block_table,
                block_size,
                slot_mapping,
                PAD_ID,
            )

        return run
