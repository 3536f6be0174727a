# SPDX-License-Identifier: Apache-2.0
"""Checksums of KV that add up: the mathematics of `verify_kv` (docs/garbled.md).

The checksum of some KV is a sum over its words, modulo 2^64:

    sum of  word * A(place in the head's entry) * B(head) * C(entry of the prompt)

A, B and C are fixed pseudo-random odd numbers. A place, a head and an entry mean the same on both sides, however their
ranks share heads and tokens. So the checksum of a decode block is the sum of those of the pieces that make it up, and
both sides get the same sums whatever is regrouped, replicated or shared on the way. In a head-major cache a head's part
of a block is opaque: it counts as one entry, the block's first.

A rank reports sums per tensor, over all tokens, and sums per column, over all tensors. A column is some neighbouring
tokens of the prompt: those of one decode block, or of several if the prompt is long. A wrong tensor and a wrong column
together name the blocks that differ. In a column each tensor's sum is multiplied by a number T(tensor). So the columns
of two tensors that were exchanged are wrong, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.core.layout import ALL_TOKENS, Geometry, Order, TokenShare
from vllm_ascend_pd.core.plan import NULL_BLOCK, Mask, Offsets, Units

Sums = npt.NDArray[np.uint64]

FORMAT = 2
"""Names these formulas in reports. Raise it with any change of them: then engines of two versions do not compare."""
MAX_COLUMNS = 1024
"""Most columns of a report. Longer prompts have longer columns."""
MAX_ROWS = 4096
"""Most tensors of a report. A rank that fills more tensors of a decode rank sends no checksums."""
# Digits of pi.
_A, _B, _C = (np.uint64(seed) for seed in (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0))
_T = np.uint64(0x082EFA98EC4E6C89)


def is_selected(share: float, ticket_id: str) -> bool:
    """Whether a ticket is among the `share` of tickets that are verified. Both sides decide alike."""
    return int(ticket_id[8:16], 16) < share * (1 << 32)


def _odd(seed: np.uint64, index: npt.NDArray[np.int64]) -> Sums:
    """Returns a pseudo-random odd number for each index (splitmix64)."""
    x = seed + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: Sums = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return odd


def word_bytes(geometry: Geometry) -> int:
    """Returns the bytes of a word: 4, or fewer where a head's entry is no multiple of 4. The same on both sides.

    With 8, changes of the highest bits of two words would cancel out.
    """
    return math.gcd(geometry.head_bytes, 4)


def place_weights(geometry: Geometry) -> Sums:
    """Returns A, for each word of one head's entry; in a head-major cache, of one head's part of a block."""
    entries = geometry.block_size // geometry.tokens_per_entry if geometry.order is Order.HEAD_MAJOR else 1
    return _odd(_A, np.arange(entries * geometry.head_bytes // word_bytes(geometry)))


def head_weights(heads: range) -> Sums:
    """Returns B, for these heads of the whole model."""
    return _odd(_B, np.arange(heads.start, heads.stop))


def tensor_weights(num_tensors: int) -> Sums:
    """Returns T, for each row of a report."""
    return _odd(_T, np.arange(num_tensors))


def column_tokens(spans: Collection[int], num_tokens: int) -> int:
    """Returns how many tokens a column has. `spans`: by cache group, the tokens that a decode block id stands for."""
    span = math.lcm(*spans)
    return span * max(1, -(-num_tokens // (span * MAX_COLUMNS)))


@dataclass(frozen=True, eq=False)
class SummedUnits:
    """Units of some requests in tensors of one geometry, whose checksums a rank takes."""

    geometry: Geometry
    # Tokens of a unit.
    unit: int
    units: Units
    # `[units]`: where each of them is, in bytes from a tensor's block 0.
    offsets: Offsets
    # `[units, entries]`: C of each entry, and 0 for entries after the end of the prompt. One entry if head-major: 0 if
    # it is a draft's and the prompt does not fill it.
    entry_weights: Sums

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        unit: int,
        ranges: Sequence[tuple[int, int]],
        blocks: Sequence[Sequence[int]],
        wanted: Sequence[tuple[Sequence[int], int]] = (),
        share: TokenShare = ALL_TOKENS,
    ) -> SummedUnits:
        """Returns the units of `unit` tokens that this rank holds of tokens `[start, stop)` of each request.

        `share`: those that it sends, if it holds more.

        `blocks`: each request's blocks in this cache, from the block of its first token on.
        `wanted`: each request's blocks on decode from its token 0 on, and the tokens of one. Units in the null block
            are left out. None: `blocks` are decode's.
        """
        units = Units.of(unit, ranges)
        span = geometry.span
        share = geometry.share if share.ranks == 1 else share
        held = units.held(share) if share.ranks > 1 else np.ones(len(units), dtype=np.bool_)
        if wanted:
            d_span = wanted[0][1]
            firsts = [start // d_span for start, _ in ranges]
            ids = [list(theirs)[first:] for (theirs, _), first in zip(wanted, firsts, strict=True)]
            held &= units.blocks(ids, firsts, d_span) != NULL_BLOCK
        units = units.cut(held)
        places = units.blocks(blocks, [start // span for start, _ in ranges], span)
        if not wanted:
            units, places = units.cut(places != NULL_BLOCK), places[places != NULL_BLOCK]
        first = units.tokens // geometry.tokens_per_entry
        stops = np.array([stop for _, stop in ranges], dtype=np.int64)[units.owner, None]
        if geometry.sent.order is Order.HEAD_MAJOR:
            weights = _odd(_C, first)[:, None]
            if geometry.draft:  # it writes the KV of drafted tokens, which is not sent, after the prompt's
                weights = weights * (units.tokens[:, None] + unit <= stops).astype(np.uint64)
        else:
            entries = first[:, None] + np.arange(unit // geometry.tokens_per_entry)
            weights = _odd(_C, entries) * ((entries + 1) * geometry.tokens_per_entry <= stops).astype(np.uint64)
        return cls(geometry, unit, units, units.offsets(places, geometry), weights)

    @property
    def unit_bytes(self) -> int:
        return self.unit // self.geometry.tokens_per_entry * self.geometry.entry_bytes

    def chosen(self, request: int, share: TokenShare) -> Mask:
        """Returns which units are those of a request, by its index, that are in a rank's share of the tokens."""
        mine: Mask = self.units.owner == request
        return mine & self.units.held(share) if share.ranks > 1 else mine


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Sums of some tensors of one geometry and of some units, for each head that a rank has.

    Adding them up takes far longer than what follows, so ranks that have the same tokens share them.
    """

    # Rows of the report that the tensors have.
    rows: tuple[int, ...]
    # `[rows, heads]`: over all units.
    by_row: Sums
    # `[columns, heads]`: over all tensors, times T.
    by_column: Sums

    @classmethod
    def of(cls, rows: Sequence[int], sums: Sequence[Sums], summed: SummedUnits, chosen: Mask, tally: Tally) -> HeadSums:
        """Adds up `sums`, `[units, heads]` of each row, over the chosen units. `tally`: of that shape."""
        columns = summed.units.tokens[chosen] // tally.column_tokens
        weights, heads = tensor_weights(len(tally.rows)), sums[0].shape[1]
        by_row = np.zeros((len(rows), heads), dtype=np.uint64)
        by_unit = np.zeros((len(columns), heads), dtype=np.uint64)
        for place, (row, each) in enumerate(zip(rows, sums, strict=True)):
            mine = each[chosen]
            by_row[place] = mine.sum(0, dtype=np.uint64)
            by_unit += mine * weights[row]
        by_column = np.zeros((len(tally.columns), heads), dtype=np.uint64)
        np.add.at(by_column, columns, by_unit)
        return cls(tuple(rows), by_row, by_column)


@dataclass
class Tally:
    """Adds up the checksums that one prefill rank reports to one decode rank, on either side.

    All sums are of the heads and tokens that both ranks have.
    """

    # `[tensors]`, in the order of the grant request's `covers`.
    rows: Sums
    # `[columns]`.
    columns: Sums
    column_tokens: int

    @classmethod
    def empty(cls, num_tensors: int, column_tokens: int, num_tokens: int) -> Tally:
        columns = -(-num_tokens // column_tokens)
        return cls(np.zeros(num_tensors, dtype=np.uint64), np.zeros(columns, dtype=np.uint64), column_tokens)

    def add(self, sums: HeadSums, own: range, common: range) -> None:
        """Adds sums of `own` heads, of which `common` count."""
        heads, weights = slice(common.start - own.start, common.stop - own.start), head_weights(common)
        self.rows[list(sums.rows)] += (sums.by_row[:, heads] * weights).sum(1, dtype=np.uint64)
        self.columns += (sums.by_column[:, heads] * weights).sum(1, dtype=np.uint64)

    def encode(self) -> bytes:
        head = np.array([FORMAT], dtype=np.uint64)
        return bytes(np.concatenate([head, self.rows, self.columns]).astype("<u8").data)

    def missing(self, reported: bytes) -> tuple[Sums, Sums] | None:
        """Returns what the rows and the columns lack of reported ones.

        None if those cannot be compared: they have another form, or their rows and columns contradict each other.
        """
        if len(reported) != 8 * (1 + len(self.rows) + len(self.columns)):
            return None
        words = np.frombuffer(reported, dtype="<u8")
        rows, columns = words[1 : 1 + len(self.rows)], words[1 + len(self.rows) :]
        weighted = rows * tensor_weights(len(rows))
        if words[0] != FORMAT or weighted.sum(dtype=np.uint64) != columns.sum(dtype=np.uint64):
            return None
        return rows - self.rows, columns - self.columns


def common_heads(own: range, theirs: range) -> range:
    """Returns the heads in both ranges, which may be none."""
    start = max(own.start, theirs.start)
    return range(start, max(start, min(own.stop, theirs.stop)))
