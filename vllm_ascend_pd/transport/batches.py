# SPDX-License-Identifier: Apache-2.0
"""Cuts descriptors into batches that Mooncake can take. Pure."""

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
"""Sources, destinations and lengths. The first two are arrays of 64-bit integers, since Mooncake's C++ reads an
array in two thirds of the time that making a Python list takes."""


class _Stretch(NamedTuple):
    """The copies of a batch that belong to one part."""

    # Index of the part, and of its base addresses.
    part: int
    # Offsets from the base addresses.
    src: Offsets
    dst: Offsets
    # Views of the batch's addresses, which `Batches.at` fills.
    src_addresses: Offsets
    dst_addresses: Offsets


class _Form(NamedTuple):
    """A batch before its base addresses are added. `stretches` are views of `batch`."""

    stretches: list[_Stretch]
    batch: Batch


@dataclass(frozen=True)
class Batches:
    """Copies in batches, for any base addresses: cut once a step, written for every layer.

    Adding base addresses allocates nothing: fresh memory takes longer to fetch than the addresses take to add.
    """

    _forms: list[_Form]

    @classmethod
    def cut(cls, parts: Sequence[Descriptors], limits: TransferLimits) -> Batches:
        """Returns `parts` in batches within `limits`, in order. Copies that are too long become several."""
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
        """Yields the batches with the base addresses of each part added.

        Every call writes into the same memory, so one thread uses a `Batches`, for one call at a time.
        """
        for stretches, batch in self._forms:
            for part, src, dst, src_addresses, dst_addresses in stretches:
                np.add(src, sources[part], src_addresses)
                np.add(dst, destinations[part], dst_addresses)
            yield batch


def _list(values: Offsets) -> list[int]:
    """Returns `values` as integers. If they are equal, as usual, they are one object: thousands of objects take longer
    to make here, and to read for every layer."""
    first = int(values[0])
    return [first] * len(values) if np.all(values == first) else values.tolist()


def _form(pieces: Sequence[Descriptors], begins: Sequence[int], first: int, stop: int, lengths: list[int]) -> _Form:
    """Returns the batch of copies `[first, stop)`. Those of each part begin at `begins`."""
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
    """Returns the same bytes in as few copies as possible of at most `longest` bytes, of about equal whole pages."""
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
