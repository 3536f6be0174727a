# SPDX-License-Identifier: Apache-2.0
"""Brings KV into the form of vllm-ascend's int8 caches: quantized, and in NZ order. The same on CPU and NPU."""

import torch

from vllm_ascend_pd.core.layout import NZ_COLUMN_BYTES


def quantize_c8(kv: torch.Tensor, inverse_scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Returns KV of dense attention in int8, as vllm-ascend's own caches have it (`attention/attention_v1.py`).

    Args:
        kv: `[tokens, heads, head size]`.
        inverse_scale, offset: `[1, heads, head size]`, or one number. Their type decides how it is rounded, too.
    """
    return torch.clamp(torch.round(kv * inverse_scale + offset), -128, 127).to(torch.int8)


def pack(rows: torch.Tensor, tokens: int, out: torch.Tensor) -> None:
    """Writes blocks in NZ order.

    Args:
        rows: `[blocks * tokens, heads, head size]`, contiguous. The row of a token is a multiple of 32 bytes.
        tokens: tokens in a block.
        out: contiguous uint8, of as many bytes. Receives `[blocks, columns, tokens, 32]`.
    """
    columns = rows.view(torch.uint8).view(-1, tokens, rows[0].nbytes // NZ_COLUMN_BYTES, NZ_COLUMN_BYTES)
    out.view(len(columns), -1, tokens, NZ_COLUMN_BYTES).copy_(columns.transpose(1, 2))
