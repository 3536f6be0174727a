# SPDX-License-Identifier: Apache-2.0
"""Descriptors in batches that Mooncake can take. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np

from vllm_ascend_pd.core.plan import Descriptors, Offsets, concatenate
from vllm_ascend_pd.transport.limits import PAGE, TransferLimits

Batch: TypeAlias = tuple[Sequence[int], Sequence[int], list[int]]
"""Sources, destinations and lengths. Mooncake takes any sequences: of an array its C++ makes integers in two thirds of
the time that a Python list of them takes to be made."""


class _Stretch(NamedTuple):
    """What of a batch is of one part: offsets from its bases, and where the addresses go."""

    part: int
    src: Offsets
    dst: Offsets
    src_addresses: Offsets
    dst_addresses: Offsets


class _Form(NamedTuple):
    """A batch without its bases. `stretches` write into `batch`."""

    stretches: list[_Stretch]
    batch: Batch


@dataclass(frozen=True)
class Batches:
    """Copies in batches that respect limits, for any base addresses: cut once a step, written for every layer. Nothing
    is allocated then: memory that was not just in use takes longer to fetch than addresses take to add."""

    _forms: list[_Form]

    @classmethod
    def cut(cls, parts: Sequence[Descriptors], limits: TransferLimits) -> Batches:
        """In order; what is longer than the limits allow becomes several copies."""
        longest = limits.piece_bytes(sum(int(part.nbytes.sum()) for part in parts))
        cut = {id(part): _cut(part, longest) for part in parts}  # K and V often are one object
        pieces = [cut[id(part)] for part in parts]
        nbytes = concatenate([part.nbytes for part in pieces])
        begins = [0, *accumulate(len(part.nbytes) for part in pieces)]
        ends = np.cumsum(nbytes)
        forms, first = [], 0
        while first < len(nbytes):
            before = int(ends[first - 1]) if first else 0
            most = int(np.searchsorted(ends, before + limits.max_bytes, side="right"))
            stop = min(first + limits.max_descriptors, most)
            forms.append(_form(pieces, begins, first, stop, _list(nbytes[first:stop])))
            first = stop
        return cls(forms)

    def at(self, sources: Sequence[int], destinations: Sequence[int]) -> Iterator[Batch]:
        """With the addresses that offsets of each part count from. A batch holds until the next call: one thread's."""
        for stretches, batch in self._forms:
            for part, src, dst, src_addresses, dst_addresses in stretches:
                np.add(src, sources[part], src_addresses)
                np.add(dst, destinations[part], dst_addresses)
            yield batch


def _list(values: Offsets) -> list[int]:
    """Most often all are the same, and then one object: thousands take longer to be made, here, and to be read, for
    every layer."""
    first = int(values[0])
    return [first] * len(values) if np.all(values == first) else values.tolist()


def _form(pieces: Sequence[Descriptors], begins: Sequence[int], first: int, stop: int, lengths: list[int]) -> _Form:
    """Of copies `[first, stop)`, where those of each part begin at `begins`."""
    sources, destinations = (array("q", bytes(8 * (stop - first))) for _ in range(2))
    src, dst = (np.frombuffer(addresses, dtype=np.int64) for addresses in (sources, destinations))
    stretches = []
    for n, (part, begin) in enumerate(zip(pieces, begins, strict=False)):
        these = slice(max(first - begin, 0), max(stop - begin, 0))
        at = slice(max(begin - first, 0), max(begin - first, 0) + len(part.nbytes[these]))
        if len(part.nbytes[these]):
            stretches.append(_Stretch(n, part.src[these], part.dst[these], src[at], dst[at]))
    return _Form(stretches, (sources, destinations, lengths))


def _cut(copies: Descriptors, longest: int) -> Descriptors:
    """The same bytes in as few copies of `longest` bytes at most, which share each one's whole pages equally."""
    if copies.nbytes.max(initial=0) <= longest:
        return copies
    counts = -(-copies.nbytes // longest)
    share = -(-copies.nbytes // np.maximum(counts, 1))
    pieces = np.minimum(-(-share // PAGE) * PAGE, longest)
    which = np.repeat(np.arange(len(counts)), counts)
    piece = pieces[which]
    offset = (np.arange(len(which)) - (np.cumsum(counts) - counts)[which]) * piece
    return Descriptors(
        copies.src[which] + offset, copies.dst[which] + offset, np.minimum(copies.nbytes[which] - offset, piece)
    )
