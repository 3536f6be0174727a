# SPDX-License-Identifier: Apache-2.0
"""The units of a step's requests, and where they lie in a cache: arrays over all requests at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ascend_pd.core.layout import Geometry, TokenShare
from vllm_ascend_pd.core.plan import Mask, Offsets, concatenate


@dataclass(frozen=True, eq=False)
class Units:
    """`tokens` `[units]`: the first token of each, as its request counts them; `owner` `[units]`: the request's index.
    Requests follow each other."""

    tokens: Offsets
    owner: Offsets

    @classmethod
    def of(cls, unit: int, ranges: Sequence[tuple[int, int]]) -> Units:
        """Those of `unit` tokens that hold tokens `[start, stop)` of each request. `start` must be a multiple of
        `unit`; a last, partly filled unit counts."""
        for start, stop in ranges:
            if start % unit or not 0 <= start <= stop:
                raise ValueError(f"tokens [{start}, {stop}) do not begin a unit of {unit} tokens")
        tokens = [np.arange(start, stop, unit, dtype=np.int64) for start, stop in ranges]
        owner = np.repeat(np.arange(len(ranges), dtype=np.int64), [len(each) for each in tokens])
        return cls(concatenate(tokens), owner)

    def __len__(self) -> int:
        return len(self.tokens)

    def where(self, mask: Mask) -> Units:
        return Units(self.tokens[mask], self.owner[mask])

    def held(self, share: TokenShare) -> Mask:
        """Which are in a rank's share. A unit is in one share only."""
        held: Mask = self.tokens // share.interleave % share.ranks == share.rank
        return held

    def blocks(self, ids: Sequence[Offsets], first: Sequence[int], span: int) -> Offsets:
        """The block of each unit. `ids[i]`: request `i`'s block ids, of `span` tokens each, from its block number
        `first[i]` on. Raises ValueError for a unit that none of them holds."""
        counts = np.array([len(each) for each in ids], dtype=np.int64)
        number = self.tokens // span - np.array(first, dtype=np.int64)[self.owner]
        if np.any(outside := (number < 0) | (number >= counts[self.owner])):
            n = int(np.argmax(outside))
            i = int(self.owner[n])
            raise ValueError(f"token {self.tokens[n]} is not in {counts[i]} blocks from block {first[i]} on")
        return concatenate(ids)[(np.cumsum(counts) - counts)[self.owner] + number]

    def offsets(self, blocks: Offsets, geometry: Geometry) -> Offsets:
        """Byte offsets from a tensor's block 0, of units in `blocks` of `geometry.span` tokens. Only those held by this
        rank have one."""
        within = self.tokens % geometry.span
        if geometry.share.ranks > 1:
            run, within_run = np.divmod(within, geometry.run)
            within = run // geometry.share.ranks * geometry.run + within_run
        offsets: Offsets = blocks * geometry.block_stride + within * geometry.token_bytes
        return offsets
