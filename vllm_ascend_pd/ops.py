# SPDX-License-Identifier: Apache-2.0
"""Ops that move KV cache bytes between the layouts of prefill and decode ranks.

A *unit* is a token-major cache block, or an aligned part of one: `[tokens, heads, head bytes]` without gaps.
The ops move bytes, so any dtype will do; every offset, stride and size is in bytes, and an offset into a tensor
counts from its `data_ptr()`. Nothing is allocated: results go to `out`, and only the bytes named below are
written. An op releases the GIL while it copies, and copies on as many threads as `torch.get_num_threads()`.

Every op raises ValueError, naming the argument, its value and the limit, before a byte is written: for a count
or offset below its minimum, a range outside its tensor, sections that overlap, `out` overlapping an input in
memory, or a tensor that is not contiguous where it must be.
"""

from importlib import import_module

import torch

try:
    import_module("vllm_ascend_pd._C")  # registers torch.ops.vllm_ascend_pd.*
except ImportError as error:
    raise ImportError(
        "vllm_ascend_pd's compiled ops cannot be loaded; build them against this environment's torch with "
        "`pip install --no-build-isolation -e .`"
    ) from error

_ops = torch.ops.vllm_ascend_pd


def gather_slices(
    cache: torch.Tensor,
    unit_offsets: torch.Tensor,
    splits: int,
    slice_bytes: int,
    out: torch.Tensor,
    out_offset: int,
    out_split_stride: int,
) -> None:
    """Collect token slice `j` of every unit in one section per rank: the input of the all-to-all.

    For `j < splits` and `n < len(unit_offsets)`::

        out[out_offset + j * out_split_stride + n * slice_bytes :][:slice_bytes]
            = cache[unit_offsets[n] + j * slice_bytes :][:slice_bytes]

    Args:
        cache: paged KV cache, strided in any way; units may lie anywhere in its memory.
        unit_offsets: `[num_units]` int64, contiguous; where each unit begins. May be empty.
        splits: token slices of a unit, the ranks of the all-to-all; at least 1.
        slice_bytes: bytes of one slice, `tokens / splits * heads * head bytes`; at least 1.
        out: contiguous buffer.
        out_offset: where section 0 begins in `out`.
        out_split_stride: from one section to the next; at least `num_units * slice_bytes` if `splits > 1`.
    """
    _ops.gather_slices(cache, unit_offsets, splits, slice_bytes, out, out_offset, out_split_stride)


def interleave_heads(
    src: torch.Tensor,
    src_offset: int,
    src_rank_stride: int,
    out: torch.Tensor,
    out_offset: int,
    ranks: int,
    tokens: int,
    row_bytes: int,
) -> None:
    """Put the heads of all ranks side by side, token by token: the all-to-all's output in decode's layout.

    For `t < tokens` and `i < ranks`::

        out[out_offset + (t * ranks + i) * row_bytes :][:row_bytes]
            = src[src_offset + i * src_rank_stride + t * row_bytes :][:row_bytes]

    Args:
        src: contiguous buffer, one section `[tokens, row_bytes]` per rank.
        src_offset: where rank 0's section begins in `src`.
        src_rank_stride: from one section to the next; at least `tokens * row_bytes` if `ranks > 1`.
        out: contiguous buffer; receives `[tokens, ranks, row_bytes]`.
        out_offset: where the result begins in `out`.
        ranks: ranks of the all-to-all; at least 1.
        tokens: tokens in each section; 0 does nothing.
        row_bytes: one rank's bytes per token, `heads * head bytes`; at least 1.
    """
    _ops.interleave_heads(src, src_offset, src_rank_stride, out, out_offset, ranks, tokens, row_bytes)


def split_heads(
    cache: torch.Tensor,
    unit_offsets: torch.Tensor,
    splits: int,
    tokens: int,
    row_bytes: int,
    out: torch.Tensor,
    out_offset: int,
    out_split_stride: int,
) -> None:
    """Collect head group `k` of every unit in one section per decode rank, laid out as that rank's cache is.

    For `k < splits`, `n < len(unit_offsets)` and `t < tokens`::

        out[out_offset + k * out_split_stride + (n * tokens + t) * row_bytes :][:row_bytes]
            = cache[unit_offsets[n] + (t * splits + k) * row_bytes :][:row_bytes]

    Args:
        cache: paged KV cache, strided in any way; units may lie anywhere in its memory.
        unit_offsets: `[num_units]` int64, contiguous; where each unit begins. May be empty.
        splits: head groups, one per decode rank; at least 1.
        tokens: tokens in a unit; 0 does nothing.
        row_bytes: one head group's bytes per token, `heads / splits * head bytes`; at least 1.
        out: contiguous buffer.
        out_offset: where section 0 begins in `out`.
        out_split_stride: from one section to the next; at least `num_units * tokens * row_bytes` if
            `splits > 1`.
    """
    _ops.split_heads(cache, unit_offsets, splits, tokens, row_bytes, out, out_offset, out_split_stride)
