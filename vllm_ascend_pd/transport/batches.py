# SPDX-License-Identifier: Apache-2.0
"""Regions as Mooncake can register them, and descriptors in batches that it can take. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from vllm_ascend_pd.core.plan import Descriptors, Offsets, concatenate
from vllm_ascend_pd.transport.limits import PAGE, TransferLimits


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


Batch: TypeAlias = tuple[Sequence[int], Sequence[int], list[int]]
"""Sources, destinations and lengths. Mooncake takes any sequences: of an array its C++ makes integers in two thirds of
the time that a Python list of them takes to be made."""


@dataclass(frozen=True)
class Batches:
    """Copies in batches that respect limits, for any base addresses: cut once a step, written for every layer.

    `offsets` `[2, copies]`: of sources and destinations, `copies[n]` of them from base `n` on, part after part. Batch
    `n` has those from `bounds[n]` to `bounds[n + 1]`; `lengths` are the same for all bases, so they are lists already.
    """

    offsets: Offsets
    copies: Offsets
    bounds: list[int]
    lengths: list[list[int]]

    @classmethod
    def cut(cls, parts: Sequence[Descriptors], limits: TransferLimits) -> Batches:
        """In order; what is longer than the limits allow becomes several copies."""
        longest = limits.piece_bytes(sum(int(part.nbytes.sum()) for part in parts))
        pieces = [_cut(part, longest) for part in parts]
        nbytes = concatenate([part.nbytes for part in pieces])
        bounds = [0]
        ends = np.cumsum(nbytes)
        while (first := bounds[-1]) < len(nbytes):
            before = int(ends[first - 1]) if first else 0
            most = int(np.searchsorted(ends, before + limits.max_bytes, side="right"))
            bounds.append(min(first + limits.max_descriptors, most))
        return cls(
            np.stack([concatenate([part.src for part in pieces]), concatenate([part.dst for part in pieces])]),
            np.array([len(part.nbytes) for part in pieces], dtype=np.int64),
            bounds,
            [nbytes[first:stop].tolist() for first, stop in pairwise(bounds)],
        )

    def at(self, sources: Sequence[int], destinations: Sequence[int]) -> Iterator[Batch]:
        """With the addresses that offsets of each part count from."""
        bases = np.array((sources, destinations), dtype=np.int64)
        src, dst = self.offsets + np.repeat(bases, self.copies, axis=1)
        for (first, stop), lengths in zip(pairwise(self.bounds), self.lengths, strict=True):
            yield array("q", src[first:stop].tobytes()), array("q", dst[first:stop].tobytes()), lengths


def _cut(copies: Descriptors, longest: int) -> Descriptors:
    """The same bytes in as few copies of `longest` bytes at most, which share each one's whole pages equally."""
    counts = -(-copies.nbytes // longest)
    if np.all(counts <= 1):
        return copies
    share = -(-copies.nbytes // np.maximum(counts, 1))
    pieces = np.minimum(-(-share // PAGE) * PAGE, longest)
    which = np.repeat(np.arange(len(counts)), counts)
    piece = pieces[which]
    offset = (np.arange(len(which)) - (np.cumsum(counts) - counts)[which]) * piece
    return Descriptors(
        copies.src[which] + offset, copies.dst[which] + offset, np.minimum(copies.nbytes[which] - offset, piece)
    )


def covered(region: tuple[int, int], known: list[tuple[int, int]]) -> bool:
    """Whether one of `known` contains the region."""
    address, size = region
    return any(begin <= address and address + size <= begin + length for begin, length in known)
