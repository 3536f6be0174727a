# SPDX-License-Identifier: Apache-2.0
"""Regions as Mooncake can register them, and descriptors in batches that it can take. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_ascend_pd.transport.engine import TransferLimits


def merge_regions(regions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, disjoint regions (address, bytes) that cover exactly the same bytes."""
    merged: list[tuple[int, int]] = []
    for address, size in sorted(regions):
        if size <= 0:
            raise ValueError(f"region at {address:#x} has {size} bytes")
        if merged and address <= sum(merged[-1]):
            begin, length = merged[-1]
            merged[-1] = (begin, max(length, address + size - begin))
        else:
            merged.append((address, size))
    return merged


def split_batches(
    sources: list[int], destinations: list[int], lengths: list[int], limits: TransferLimits
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Cut descriptors into batches (sources, destinations, lengths) that respect `limits`, in order."""
    piece = min(limits.max_descriptor_bytes, limits.max_bytes)
    if max(lengths, default=0) > piece:
        sources, destinations, lengths = _cut(sources, destinations, lengths, piece)
    # In slices: a step's layer may have thousands of descriptors, and a loop over them would cost more than planning.
    first, count = 0, len(lengths)
    while first < count:
        stop = min(first + limits.max_descriptors, count)
        if sum(lengths[first:stop]) > limits.max_bytes:
            stop = first + bisect_right(list(accumulate(lengths[first:stop])), limits.max_bytes)
        yield sources[first:stop], destinations[first:stop], lengths[first:stop]
        first = stop


def _cut(
    sources: list[int], destinations: list[int], lengths: list[int], piece: int
) -> tuple[list[int], list[int], list[int]]:
    """The same bytes in descriptors of `piece` bytes at most."""
    cut: tuple[list[int], list[int], list[int]] = ([], [], [])
    for source, destination, length in zip(sources, destinations, lengths, strict=True):
        for offset in range(0, length, piece):
            for column, value in zip(
                cut, (source + offset, destination + offset, min(piece, length - offset)), strict=True
            ):
                column.append(value)
    return cut


def covered(region: tuple[int, int], known: list[tuple[int, int]]) -> bool:
    """Whether one of `known` contains the region."""
    address, size = region
    return any(begin <= address and address + size <= begin + length for begin, length in known)
