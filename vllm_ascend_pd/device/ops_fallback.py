# SPDX-License-Identifier: Apache-2.0
"""The block ops on an NPU without compiled kernels: the same results from torch's own operators.

Splitting takes a division for the indices, then one `index_select` and one strided `copy_` per cache; interleaving
takes one strided `copy_`; checksums take seven operators per cache. They differ from `ops` in one demand: a unit begins
at a multiple of the greatest common divisor of a unit's bytes and the caches' block strides, as units of a paged cache
do. Offsets in device memory cannot be checked for that.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

# By the bytes of a word.
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}

_library: torch.library.Library | None = None
_reason = ""


def register(reason: str) -> None:
    """Makes these the NPU's implementations. `reason` says why, for the warning."""
    global _library, _reason  # the registrations last as long as the library does
    _library, _reason = torch.library.Library("vllm_ascend_pd", "IMPL"), reason
    for implementation in (gather_units, split_heads, interleave_heads, sum_units, sum_units_32):
        _library.impl(implementation.__name__, _warning_first(implementation), "PrivateUse1")


@functools.cache
def warn_once() -> None:
    """Warn that these are in use, if they are. An engine that may regroup calls it when it starts, and so does the
    first op."""
    if _reason:
        logger.warning(
            "The NPU kernels of vllm_ascend_pd are not in use (%s): torch_npu's operators regroup KV and take "
            "checksums, with more launches and copies. Where CANN is installed, `pip install -v --no-build-isolation` "
            "of vllm-ascend-pd builds them or says why it does not.",
            _reason,
        )


def _warning_first(implementation: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        warn_once()
        implementation(*args)

    return call


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
    args = (unit_offsets, unit_bytes, section_units, out, out_offset, out_cache_stride, out_section_stride)
    if torch.ops.vllm_ascend_pd.check_gather_units(caches, *args):
        for c, units in enumerate(_units(caches, unit_offsets, unit_bytes)):
            begin = out_offset + c * out_cache_stride
            whole = len(units) // section_units * section_units
            for some in (units[:whole], units[whole:]):
                if len(some):
                    sections = some.view(-1, min(section_units, len(some)) * unit_bytes)
                    _window(_flat(out), sections.shape, (out_section_stride, 1), begin).copy_(sections)
                begin += whole // section_units * out_section_stride


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
    args = (unit_offsets, splits, tokens, row_bytes, out, out_offset, out_cache_stride, out_section_stride)
    if torch.ops.vllm_ascend_pd.check_split_heads(caches, *args):
        num_units = len(unit_offsets)
        for c, units in enumerate(_units(caches, unit_offsets, splits * tokens * row_bytes)):
            sections = _window(
                _flat(out),
                (splits, num_units, tokens, row_bytes),
                (out_section_stride, tokens * row_bytes, row_bytes, 1),
                out_offset + c * out_cache_stride,
            )
            sections.copy_(units.view(num_units, tokens, splits, row_bytes).permute(2, 0, 1, 3))


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
    if torch.ops.vllm_ascend_pd.check_interleave_heads(
        src, src_offset, src_rank_stride, out, out_offset, ranks, tokens, row_bytes
    ):
        sections = _window(_flat(src), (ranks, tokens, row_bytes), (src_rank_stride, row_bytes, 1), src_offset)
        result = _flat(out)[out_offset:][: tokens * ranks * row_bytes].view(tokens, ranks, row_bytes)
        result.copy_(sections.transpose(0, 1))


def sum_units(
    caches: Sequence[torch.Tensor],
    unit_offsets: Sequence[torch.Tensor],
    entry_weights: Sequence[torch.Tensor],
    place_weights: Sequence[torch.Tensor],
    heads: Sequence[int],
    word_bytes: Sequence[int],
    out: torch.Tensor,
) -> None:
    torch.ops.vllm_ascend_pd.check_sum_units(caches, unit_offsets, entry_weights, place_weights, heads, word_bytes, out)
    sizes = [len(offsets) * n for offsets, n in zip(unit_offsets, heads, strict=True)]
    for c, result in enumerate(out[: sum(sizes)].split(sizes)):
        (units, entries), words = entry_weights[c].shape, len(place_weights[c])
        if units:
            unit_bytes = entries * heads[c] * words * word_bytes[c]
            found = next(_units(caches[c : c + 1], unit_offsets[c], unit_bytes))
            read = found.view(-1).view(_WORDS[word_bytes[c]]).to(torch.int64).view(units, entries, heads[c], words)
            by_entry = (read * place_weights[c]).sum(-1) * entry_weights[c][:, :, None]
            torch.sum(by_entry, 1, out=result.view(units, heads[c]))


def sum_units_32(
    caches: Sequence[torch.Tensor],
    unit_offsets: Sequence[torch.Tensor],
    entry_weights: Sequence[torch.Tensor],
    place_weights: Sequence[torch.Tensor],
    heads: Sequence[int],
    words: Sequence[int],
    out: torch.Tensor,
) -> None:
    """By products of int64, whose low 32 bits are the sums whatever int32 products keep."""
    torch.ops.vllm_ascend_pd.check_sum_units_32(caches, unit_offsets, entry_weights, place_weights, heads, words, out)
    sizes = [2 * len(offsets) * n for offsets, n in zip(unit_offsets, heads, strict=True)]
    for c, result in enumerate(out[: sum(sizes)].split(sizes)):
        units, entries, _ = entry_weights[c].shape
        if units:
            found = next(_units(caches[c : c + 1], unit_offsets[c], 4 * entries * heads[c] * words[c]))
            read = found.view(-1).view(torch.int32).to(torch.int64).view(units, entries, heads[c], 1, words[c])
            halves = torch.stack((read & 0xFFFF, (read >> 16) & 0xFFFF), -2)  # [..., 1, 2, words]
            places = place_weights[c][:, :, : words[c]].to(torch.int64)
            by_entry = (halves * places).sum((-2, -1)) * entry_weights[c].to(torch.int64)[:, :, None]
            low = torch.bitwise_and(by_entry.sum(1), 0xFFFFFFFF)
            signed = torch.where(low >= 1 << 31, low - (1 << 32), low)
            result.view(units, heads[c], 2).copy_(signed.to(torch.int32))


def _units(caches: Sequence[torch.Tensor], unit_offsets: torch.Tensor, unit_bytes: int) -> Iterator[torch.Tensor]:
    """Yields the units of each cache, `[num_units, unit_bytes]`."""
    piece = math.gcd(unit_bytes, *(cache.stride(0) * cache.itemsize for cache in caches if cache.dim()))
    if unit_offsets.is_cpu and (unit_offsets % piece).any():
        raise ValueError(f"unit_offsets must be multiples of {piece} bytes")
    index = torch.div(unit_offsets, piece, rounding_mode="floor")
    if piece != unit_bytes:
        steps = torch.arange(unit_bytes // piece, dtype=torch.int64, device=unit_offsets.device)
        index = (index[:, None] + steps).flatten()
    for cache in caches:
        memory = _flat(cache)
        pieces = memory[: memory.numel() // piece * piece].view(-1, piece)
        yield pieces.index_select(0, index).view(len(unit_offsets), unit_bytes)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory as uint8 `[n]`, from its first to its last element, with gaps between blocks."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(torch.uint8)


def _window(memory: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    return memory.as_strided(shape, strides, memory.storage_offset() + offset)
