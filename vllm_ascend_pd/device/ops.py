# SPDX-License-Identifier: Apache-2.0
"""Ops on blocks of KV: they move bytes between the layouts of prefill and decode ranks, and take checksums.

A *unit* is a token-major cache block, or an aligned part of one: `[tokens, heads, head bytes]` without gaps.
The ops move bytes, so any dtype will do; every offset, stride and size is in bytes, and an offset into a tensor
counts from its `data_ptr()`. Nothing is allocated: results go to `out`, and only the bytes named below are
written. All tensors of a layer (K and V) go through one call.

On the CPU an op releases the GIL while it copies, and copies on as many threads as `torch.get_num_threads()`.
On an NPU it queues one kernel on the current stream (one for every 8 caches), for rows of any size, though those
of a multiple of 32 bytes move faster; where the kernels were not built or cannot be loaded, `ops_fallback` does the
same with torch's operators.

Every op raises ValueError, naming the argument, its value and the limit, before a byte is written: for a count
or offset below its minimum, a range outside its tensor, sections that overlap, `out` overlapping a cache in
memory, a tensor on another device than `out`, or one that is not contiguous where it must be. Only the values in
`unit_offsets` are not looked at on an NPU: that would wait for the device.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from vllm_ascend_pd.device import ops_fallback

try:
    import_module("vllm_ascend_pd._C")  # registers torch.ops.vllm_ascend_pd.*
except ImportError as error:
    raise ImportError(
        "vllm_ascend_pd's compiled ops cannot be loaded; build them against this environment's torch with "
        "`pip install --no-build-isolation -e .`"
    ) from error

_ops = torch.ops.vllm_ascend_pd

NPU_LIBRARY = Path(__file__).parents[1] / "libvllm_ascend_pd_npu.so"
"""Registers the NPU's implementations when loaded; setup.py builds it where CANN is."""


@dataclass(frozen=True)
class NpuKernels:
    """Whether the compiled kernels are the NPU's implementations of the ops."""

    reason: str = ""
    """Why they are not; "" if they are."""
    error: str = ""
    """What the loader says of a library that was built."""


def _load_npu_kernels() -> NpuKernels:
    if "torch_npu" not in sys.modules:
        missing = NpuKernels("torch_npu was not imported before vllm_ascend_pd.device.ops")
    elif not NPU_LIBRARY.exists():
        missing = NpuKernels("they were not built when vllm-ascend-pd was installed")
    else:
        try:
            torch.ops.load_library(NPU_LIBRARY)
        except OSError as problem:
            error = str(problem.__cause__ or problem)  # torch names the library, its cause what the loader lacks
            missing = NpuKernels(f"they cannot be loaded: {error}", error)
        else:
            return NpuKernels()
    ops_fallback.register(missing.reason)
    return missing


npu_kernels = _load_npu_kernels()


def gather_units(
    caches: Sequence[torch.Tensor],
    unit_offsets: torch.Tensor,
    unit_bytes: int,
    section_units: int,
    out: torch.Tensor,
    out_offset: int,
    out_cache_stride: int,
    out_section_stride: int,
) -> None:
    """Collect every cache's units in one section per rank that gets them: the all-to-all's input.

    For `c < len(caches)` and `n < len(unit_offsets)`::

        out[out_offset + c * out_cache_stride + n // section_units * out_section_stride
            + n % section_units * unit_bytes :][:unit_bytes]
            = caches[c][unit_offsets[n] :][:unit_bytes]

    Args:
        caches: paged KV caches of one geometry, at least 1, strided in any way; units may lie anywhere in their
            memory.
        unit_offsets: `[num_units]` int64, contiguous; where each unit begins in each cache. May be empty.
        unit_bytes: bytes of a unit, `tokens * heads * head bytes`; at least 1.
        section_units: units of each section but the last, which may have fewer; at least 1.
        out: contiguous buffer, with room for a whole last section.
        out_offset: where the first section of cache 0 begins in `out`.
        out_cache_stride, out_section_stride: from one cache's or rank's section to the next. A section has
            `min(section_units, num_units) * unit_bytes`; the larger stride steps over all sections that the smaller
            one covers. Unused where there is 1 cache or section.
    """
    _ops.gather_units(
        caches, unit_offsets, unit_bytes, section_units, out, out_offset, out_cache_stride, out_section_stride
    )


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
    caches: Sequence[torch.Tensor],
    unit_offsets: torch.Tensor,
    splits: int,
    tokens: int,
    row_bytes: int,
    out: torch.Tensor,
    out_offset: int,
    out_cache_stride: int,
    out_section_stride: int,
) -> None:
    """Collect head group `k` of every unit in one section per cache and decode rank, laid out as that rank's
    cache is.

    For `c < len(caches)`, `k < splits`, `n < len(unit_offsets)` and `t < tokens`::

        out[out_offset + c * out_cache_stride + k * out_section_stride + (n * tokens + t) * row_bytes :][:row_bytes]
            = caches[c][unit_offsets[n] + (t * splits + k) * row_bytes :][:row_bytes]

    Args:
        caches: paged KV caches of one geometry, at least 1, strided in any way; units may lie anywhere in their
            memory.
        unit_offsets: `[num_units]` int64, contiguous; where each unit begins in each cache. May be empty.
        splits: head groups, one per decode rank; at least 1.
        tokens: tokens in a unit; 0 does nothing.
        row_bytes: one head group's bytes per token, `heads / splits * head bytes`; at least 1.
        out: contiguous buffer.
        out_offset: where the section of cache 0 and head group 0 begins in `out`.
        out_cache_stride, out_section_stride: from one cache's or group's section to the next. A section has
            `num_units * tokens * row_bytes`; the larger stride steps over all sections that the smaller one
            covers. Unused where there is 1 cache or group.
    """
    _ops.split_heads(
        caches, unit_offsets, splits, tokens, row_bytes, out, out_offset, out_cache_stride, out_section_stride
    )


def sum_units(
    caches: Sequence[torch.Tensor],
    unit_offsets: Sequence[torch.Tensor],
    entry_weights: Sequence[torch.Tensor],
    place_weights: Sequence[torch.Tensor],
    heads: Sequence[int],
    word_bytes: Sequence[int],
    out: torch.Tensor,
) -> None:
    """Take the checksums of units of several caches, which may differ in every way (`core/checksum.py`).

    A unit of cache `c` is `[entries, heads[c], words]`. For each of its units, and `h < heads[c]`, `out` gets the sum
    modulo 2^64 over `e < entries` and `w < words` of::

        unit[e, h, w] * entry_weights[c][unit, e] * place_weights[c][w]

    Args:
        caches: as in `gather_units`. All arguments but `out` have one element for each.
        unit_offsets: `[num_units]` int64, contiguous; where each unit begins in the cache.
        entry_weights: `[num_units, entries]` int64, contiguous.
        place_weights: `[words]` int64, contiguous.
        heads: heads of a unit; at least 1.
        word_bytes: 4 or 2 for signed words, or 1 for unsigned ones.
        out: `[n]` int64, contiguous; receives `[num_units, heads]` of each cache, one after another.
    """
    _ops.sum_units(caches, unit_offsets, entry_weights, place_weights, heads, word_bytes, out)


def sum_units_32(
    caches: Sequence[torch.Tensor],
    unit_offsets: Sequence[torch.Tensor],
    entry_weights: Sequence[torch.Tensor],
    place_weights: Sequence[torch.Tensor],
    heads: Sequence[int],
    words: Sequence[int],
    out: torch.Tensor,
) -> None:
    """Take two checksums of 32 bits of units of several caches, which a vector unit can: it has no 64-bit products.

    A unit of cache `c` is `[entries, heads[c], words[c]]` of 4 bytes. For each of its units, `h < heads[c]` and
    `k < 2`, `out` gets the sum modulo 2^32 over `e < entries`, `w < words[c]` and `half < 2` of::

        half-th 16 bits of unit[e, h, w] * entry_weights[c][unit, e, k] * place_weights[c][k, half, w]

    Halves count apart, or changes of the highest bits of two words would cancel out.

    Args:
        caches, unit_offsets, heads: as in `sum_units`.
        entry_weights: `[num_units, entries, 2]` int32, contiguous.
        place_weights: `[2, 2, words]` int32, contiguous, with `words` rounded up to a multiple of 8, and 0 there.
        words: words of 4 bytes of one head's entry; at least 1.
        out: `[n]` int32, contiguous; receives `[num_units, heads, 2]` of each cache, one after another.
    """
    _ops.sum_units_32(caches, unit_offsets, entry_weights, place_weights, heads, words, out)
