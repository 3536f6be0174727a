# SPDX-License-Identifier: Apache-2.0
"""Regions as Mooncake can register them, and descriptors in batches that it can take. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    if len(lengths) <= limits.max_descriptors and sum(lengths) <= limits.max_bytes and max(lengths, default=0) <= piece:
        yield sources, destinations, lengths
        return
    batch: tuple[list[int], list[int], list[int]] = ([], [], [])
    batch_bytes = 0
    for source, destination, length in zip(sources, destinations, lengths, strict=True):
        for offset in range(0, length, piece):
            size = min(piece, length - offset)
            if len(batch[0]) == limits.max_descriptors or batch_bytes + size > limits.max_bytes:
                yield batch
                batch, batch_bytes = ([], [], []), 0
            for column, value in zip(batch, (source + offset, destination + offset, size), strict=True):
                column.append(value)
            batch_bytes += size
    if batch[0]:
        yield batch


def covered(region: tuple[int, int], known: list[tuple[int, int]]) -> bool:
    """Whether one of `known` contains the region."""
    address, size = region
    return any(begin <= address and address + size <= begin + length for begin, length in known)
