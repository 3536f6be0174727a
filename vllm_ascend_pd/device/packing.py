# SPDX-License-Identifier: Apache-2.0
"""Brings KV into the form of vllm-ascend's int8 caches: quantized, and in NZ order. The same on CPU and NPU."""

import torch

from vllm_ascend_pd.core.caches import Quantize
from vllm_ascend_pd.core.layout import NZ_COLUMN_BYTES


def quantize_c8(kv: torch.Tensor, inverse_scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Returns KV of dense attention in int8, as vllm-ascend's own caches have it (`attention/attention_v1.py`).

    Args:
        kv: `[tokens, heads, head size]`.
        inverse_scale, offset: `[1, heads, head size]`, or one number. Their type decides how it is rounded, too.
    """
    return torch.clamp(torch.round(kv * inverse_scale + offset), -128, 127).to(torch.int8)


def packed(gathered: torch.Tensor, cache: torch.Tensor, tokens: int, quantize: Quantize | None) -> torch.Tensor:
    """Returns blocks as decode keeps them: quantized if `quantize` is given, and in NZ order.

    Args:
        gathered: contiguous uint8, the blocks of `cache` that are wanted, one after another.
        cache: `[num_blocks, tokens, heads, head size]`.
        tokens: tokens in a block.

    Returns uint8 `[blocks, columns, tokens, 32]`, not contiguous.
    """
    rows = gathered.view(-1).view(cache.dtype).view(-1, *cache.shape[2:])
    rows = rows if quantize is None else quantize(rows)
    columns = rows.view(torch.uint8).view(-1, tokens, rows[0].nbytes // NZ_COLUMN_BYTES, NZ_COLUMN_BYTES)
    return columns.transpose(1, 2)
