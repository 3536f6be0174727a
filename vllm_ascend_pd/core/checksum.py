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
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.core.layout import ALL_TOKENS, Geometry, Order, TokenShare
from vllm_ascend_pd.core.plan import NULL_BLOCK, Mask, Offsets, Units

Sums = npt.NDArray[Any]
"""Of uint64, or of uint32 for one lane of `Form.SUM_32`."""


class Form(IntEnum):
    """How checksums are computed. The values name the formulas in reports and tickets. Raise them with any change: then
    engines of two versions do not compare."""

    SUM_64 = 2
    """One sum modulo 2^64."""
    SUM_32 = 3
    """Two sums modulo 2^32 over words of 16 bits, which a vector unit without 64-bit products takes. Their weights are
    the lower and the upper halves of those of `SUM_64`, made odd."""

    @property
    def lanes(self) -> tuple[int | None, ...]:
        """The sums that are taken side by side, as `lane` in this module: None is the one of 64 bits."""
        return (None,) if self is Form.SUM_64 else (0, 1)


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


def of_lane(weights: Sums, lane: int | None) -> Sums:
    """Returns weights of 64 bits as those of a lane. 0 stays 0."""
    if lane is None:
        return weights
    half = (weights >> np.uint64(32 * lane)).astype(np.uint32)
    found: Sums = np.where(weights == 0, np.uint32(0), half | np.uint32(1))
    return found


def takes_32_bits(geometry: Geometry) -> bool:
    """Returns whether `Form.SUM_32` can be taken: a head's entry is a multiple of 4 bytes."""
    return word_bytes(geometry) == 4


def word_bytes(geometry: Geometry) -> int:
    """Returns the bytes of a word: 4, or fewer where a head's entry is no multiple of 4. The same on both sides.

    With 8, changes of the highest bits of two words would cancel out.
    """
    return math.gcd(geometry.head_bytes, 4)


def words_of(geometry: Geometry) -> int:
    """Returns the words of one head's entry; in a head-major cache, of one head's part of a block."""
    entries = geometry.block_size // geometry.tokens_per_entry if geometry.order is Order.HEAD_MAJOR else 1
    return entries * geometry.head_bytes // word_bytes(geometry)


def place_weights(geometry: Geometry) -> Sums:
    """Returns A, for each of `words_of`."""
    return _odd(_A, np.arange(words_of(geometry)))


def half_weights(geometry: Geometry) -> npt.NDArray[np.uint32]:
    """Returns A of `Form.SUM_32`, `[lanes, halves, words]`, with words up to a multiple of 8, which are 0."""
    words = words_of(geometry)
    places = _odd(_A, np.arange(2 * words)).reshape(words, 2).T
    found = np.zeros((2, 2, -(-words // 8) * 8), dtype=np.uint32)
    found[:, :, :words] = [of_lane(places, lane) for lane in Form.SUM_32.lanes]
    return found


def head_weights(heads: range, lane: int | None = None) -> Sums:
    """Returns B, for these heads of the whole model."""
    return of_lane(_odd(_B, np.arange(heads.start, heads.stop)), lane)


def tensor_weights(num_tensors: int, lane: int | None = None) -> Sums:
    """Returns T, for each row of a report."""
    return of_lane(_odd(_T, np.arange(num_tensors)), lane)


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
        weights, heads, kind = tensor_weights(len(tally.rows), tally.lane), sums[0].shape[1], tally.rows.dtype
        by_row = np.zeros((len(rows), heads), dtype=kind)
        by_unit = np.zeros((len(columns), heads), dtype=kind)
        for place, (row, each) in enumerate(zip(rows, sums, strict=True)):
            mine = each[chosen]
            by_row[place] = mine.sum(0, dtype=kind)
            by_unit += mine * weights[row]
        by_column = np.zeros((len(tally.columns), heads), dtype=kind)
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
    lane: int | None = None

    @classmethod
    def empty(cls, num_tensors: int, column_tokens: int, num_tokens: int, lane: int | None = None) -> Tally:
        columns, kind = -(-num_tokens // column_tokens), np.uint64 if lane is None else np.uint32
        return cls(np.zeros(num_tensors, dtype=kind), np.zeros(columns, dtype=kind), column_tokens, lane)

    def add(self, sums: HeadSums, own: range, common: range) -> None:
        """Adds sums of `own` heads, of which `common` count."""
        heads, kind = slice(common.start - own.start, common.stop - own.start), self.rows.dtype
        weights = head_weights(common, self.lane)
        self.rows[list(sums.rows)] += (sums.by_row[:, heads] * weights).sum(1, dtype=kind)
        self.columns += (sums.by_column[:, heads] * weights).sum(1, dtype=kind)

    def lacks(self, words: Sums) -> tuple[Sums, Sums] | None:
        """Returns what the rows and the columns lack of reported ones, which are of this lane.

        None if those cannot be compared: their rows and columns contradict each other.
        """
        rows, columns, kind = words[: len(self.rows)], words[len(self.rows) :], self.rows.dtype
        weighted = rows * tensor_weights(len(rows), self.lane)
        if weighted.sum(dtype=kind) != columns.sum(dtype=kind):
            return None
        return rows - self.rows, columns - self.columns


@dataclass(frozen=True)
class Tallies:
    """A `Tally` for each lane of a form."""

    form: Form
    lanes: tuple[Tally, ...]

    @classmethod
    def empty(cls, form: Form, num_tensors: int, column_tokens: int, num_tokens: int) -> Tallies:
        return cls(form, tuple(Tally.empty(num_tensors, column_tokens, num_tokens, lane) for lane in form.lanes))

    def fold(self, rows: Sequence[int], sums: Sequence[Sums], summed: SummedUnits, chosen: Mask) -> list[HeadSums]:
        """Adds up `sums` over the chosen units, for each lane. `sums`: of each row, `[units, heads]` or, of `SUM_32`,
        `[units, heads, lanes]`."""
        of = [[each if tally.lane is None else each[:, :, tally.lane] for each in sums] for tally in self.lanes]
        return [HeadSums.of(rows, own, summed, chosen, tally) for tally, own in zip(self.lanes, of, strict=True)]

    def add(self, sums: Sequence[HeadSums], own: range, common: range) -> None:
        """As `Tally.add`, with what `fold` returns."""
        for tally, each in zip(self.lanes, sums, strict=True):
            tally.add(each, own, common)

    def encode(self) -> bytes:
        words = [np.concatenate([tally.rows, tally.columns]) for tally in self.lanes]
        head = np.array([self.form], dtype="<u8")
        return head.tobytes() + np.stack(words, 1).astype(words[0].dtype.newbyteorder("<")).tobytes()

    def missing(self, reported: bytes) -> tuple[Sums, Sums] | None:
        """Returns what the rows and the columns lack of reported ones: 0 where nothing. Of `SUM_32`, both lanes' bits.

        None if those cannot be compared: they have another form, or their rows and columns contradict each other.
        """
        first = self.lanes[0]
        if form_of(reported) is not self.form or len(reported) != 8 * (1 + len(first.rows) + len(first.columns)):
            return None
        kind = first.rows.dtype.newbyteorder("<")
        words = np.frombuffer(reported, dtype=kind, offset=8).reshape(-1, len(self.lanes)).astype(first.rows.dtype)
        found = [tally.lacks(words[:, place]) for place, tally in enumerate(self.lanes)]
        if any(each is None for each in found):
            return None
        rows, columns = zip(*(each for each in found if each is not None), strict=True)
        return _joined(rows), _joined(columns)


def _joined(lanes: Sequence[Sums]) -> Sums:
    joined: Sums = sum(lane.astype(np.uint64) << np.uint64(32 * place) for place, lane in enumerate(lanes))  # type: ignore[assignment]
    return joined


def form_of(reported: bytes) -> Form | None:
    """Returns the form of reported checksums. None: this version does not know it."""
    value = int.from_bytes(reported[:8], "little")
    return Form(value) if value in list(Form) else None


def common_heads(own: range, theirs: range) -> range:
    """Returns the heads in both ranges, which may be none."""
    start = max(own.start, theirs.start)
    return range(start, max(start, min(own.stop, theirs.stop)))
