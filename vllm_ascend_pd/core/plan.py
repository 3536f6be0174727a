# SPDX-License-Identifier: Apache-2.0
"""Plans what one prefill rank sends of a step: turns block ids into copies, as arrays of byte offsets.

A `RankMapping` says, once per decode engine's shape and cache geometry, what happens to every unit of KV on its way:
whether it is regrouped, and which bytes of it go to which decode ranks. A unit is the longest run of tokens that lies
within one block on either side. Per step only block ids change, per layer only base addresses. So all layers share
mappings and offsets.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.core.layout import ALL_TOKENS, Geometry, LayoutError, Order, RankCaches, TokenShare
from vllm_ascend_pd.core.topology import Sharding, exchanged_heads, held, lanes


def _integers(values: Sequence[int]) -> Offsets:
    """Returns an array of `values`, in less than half of the time that `np.array` takes."""
    return np.frombuffer(struct.pack(f"{len(values)}q", *values), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Units:
    """Units of several requests, one request after the other."""

    # `[units]`: the first token of each unit, as its request counts them.
    tokens: Offsets
    # `[units]`: the index of the request that each unit belongs to.
    owner: Offsets

    @classmethod
    def of(cls, unit: int, ranges: Sequence[tuple[int, int]]) -> Units:
        """Returns the units of `unit` tokens that hold tokens `[start, stop)` of each request.

        A request's last unit may be filled in part. Raises ValueError if a `start` is not a multiple of `unit`.
        """
        for start, stop in ranges:
            if start % unit or not 0 <= start <= stop:
                raise ValueError(f"tokens [{start}, {stop}) do not begin a unit of {unit} tokens")
        counts = [-(-(stop - start) // unit) for start, stop in ranges]
        begins = accumulate(counts, initial=0)
        # For each request: the offset, in tokens, from a unit's index to its first token.
        ahead = [start - begin * unit for (start, _), begin in zip(ranges, begins, strict=False)]
        owner = np.repeat(np.arange(len(ranges), dtype=np.int64), counts)
        return cls(np.arange(len(owner), dtype=np.int64) * unit + _integers(ahead)[owner], owner)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, at: slice | Offsets | Mask) -> Units:
        """Returns the units at these places, in this order, or those of a mask."""
        return Units(self.tokens[at], self.owner[at])

    def held(self, share: TokenShare) -> Mask:
        """Returns which units are in a rank's share. A unit is in one share only."""
        held: Mask = self.tokens // share.interleave % share.ranks == share.rank
        return held

    def blocks(self, ids: Sequence[Sequence[int]], first: Sequence[int], span: int) -> Offsets:
        """Returns the block of each unit. `ids[i]`: request `i`'s block ids, of `span` tokens each, from its block
        number `first[i]` on. Raises ValueError for a unit that none of them holds."""
        # Where each request's ids are among those of all, and which of its blocks would be the first of all.
        ends = list(accumulate(map(len, ids)))
        begins = [0, *ends][: len(ids)]
        zeroth = [begin - number for begin, number in zip(begins, first, strict=True)]
        place = self.tokens // span + _integers(zeroth)[self.owner]
        outside = (place < _integers(begins)[self.owner]) | (place >= _integers(ends)[self.owner])
        if outside.any():
            n = int(np.argmax(outside))
            i = int(self.owner[n])
            raise ValueError(f"token {self.tokens[n]} is not in {len(ids[i])} blocks from block {first[i]} on")
        blocks: Offsets = _integers(list(chain.from_iterable(ids)))[place]
        return blocks

    def offsets(self, blocks: Offsets, geometry: Geometry) -> Offsets:
        """Returns byte offsets from a tensor's block 0, of units in `blocks` of `geometry.span` tokens. Only units that
        this rank holds have one."""
        within = self.tokens % geometry.span
        if geometry.share.ranks > 1:
            run, within_run = np.divmod(within, geometry.run)
            within = run // geometry.share.ranks * geometry.run + within_run
        if geometry.tokens_per_entry > 1:
            within = within // geometry.tokens_per_entry
        offsets: Offsets = blocks * geometry.block_stride + within * geometry.entry_bytes
        return offsets


Offsets = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NULL_BLOCK = 0
"""The block that stands for none: vLLM's block pool never gives it to a request (`BlockPool.null_block`)."""


@dataclass(frozen=True)
class UnitPortion:
    """The portion of every source unit that goes to one decode rank: one run of `nbytes`.

    Offsets count from the start of the unit, on either side, in bytes.
    """

    # The decode rank.
    tp_rank: int
    nbytes: int
    # The staging plane that the bytes come from. Always 0 unless heads are split.
    plane: int = 0
    # Where the run begins in the source unit.
    src_offset: int = 0
    # Where it goes in decode's unit.
    dst_offset: int = 0


@dataclass(frozen=True)
class RankMapping:
    """What one prefill rank sends of each unit of a geometry, and to which ranks of a decode engine.

    Units that are regrouped are *staged*: the ranks of a group bring the heads of all of them together, each rank for
    its own share of whole units, and divide these heads into planes, one for each decode rank that wants them.

    If several prefill ranks hold the same KV, those that write to the same decode ranks divide the tickets: each serves
    those whose `replica_hash` selects its index.
    """

    # Tokens of a unit.
    unit: int
    portions: tuple[UnitPortion, ...]
    # The index of this rank among the ranks that hold the same KV and write to the same decode ranks.
    replica_index: int = 0
    # How many of them there are.
    replicas: int = 1
    # The ranks that exchange heads, in the order of their heads. Empty if none do.
    ranks: tuple[int, ...] = ()
    # This rank's index in the group.
    index: int = 0
    # How many planes a staging slot has for a tensor. 0 if nothing is staged.
    planes: int = 0
    # Entries of a unit.
    entries: int = 0
    # Bytes of one entry in our cache.
    source_row: int = 0
    # Bytes of one entry in a plane, and in decode's cache.
    plane_row: int = 0
    # Whether staging only brings units into the form in which decode keeps them (`Packing`). All heads stay together.
    packs: bool = False
    # The tokens that this rank sends. It may have more of them.
    token_share: TokenShare = ALL_TOKENS

    @cached_property
    def is_staged(self) -> bool:
        """Whether units are regrouped before they are written."""
        return self.planes > 0

    @cached_property
    def ratio(self) -> int:
        """How many ranks share the staged units of a step."""
        return max(1, len(self.ranks))

    @cached_property
    def source_bytes(self) -> int:
        """Bytes of a unit in our cache."""
        return self.entries * self.source_row

    @cached_property
    def staged_bytes(self) -> int:
        """Bytes of a unit in a plane."""
        return self.entries * self.plane_row

    def serves(self, replica_hash: int) -> bool:
        return replica_hash % self.replicas == self.replica_index

    def slot_units(self, slot_bytes: int, tensors: int) -> int:
        """Returns how many units of `tensors` a group regroups at a time, so that each rank's share fits its slot."""
        if self.packs:  # one tensor at a time is gathered as it is
            return slot_bytes // max(self.source_bytes, tensors * self.staged_bytes)
        return slot_bytes // (tensors * self.source_bytes) // self.ratio * self.ratio

    def share(self, count: int) -> tuple[int, slice]:
        """Returns of `count` staged units: the most that a rank of the group gets, and which of them are this rank's.

        Each rank gets a contiguous part, so that neighbours are written by one rank. The last ranks may get none.
        """
        most = -(-count // self.ratio)
        return most, slice(min(self.index * most, count), min((self.index + 1) * most, count))


def make_mapping(source: Geometry, rank: int, prefill: Sharding, decode: Sharding, d_block_size: int) -> RankMapping:
    """Returns what prefill's `rank` sends of `source`'s units to a decode engine.

    `d_block_size`: tokens in decode's blocks. Raises LayoutError or TopologyError if the two sides cannot fit.
    """
    kept, source = source, source.sent  # as it lies in the cache, and as decode gets it: packed, for instance
    total = source.total_heads
    if source.copied:
        d_block_size *= decode.parts
    prefill, decode = held(source, prefill, decode)
    share = prefill.share(rank)
    num_lanes, replicas = lanes(prefill, decode, total)
    replica = prefill.replica_index(rank, total)
    replica_index, lane = divmod(replica, num_lanes)
    unit = _common_unit(source, share, decode, d_block_size)
    # Units begin and end with entries: both sides' blocks hold whole ones.
    entries = unit // source.tokens_per_entry
    own = prefill.heads(rank, total)
    d_ranks = [
        d_rank
        for d_rank in range(decode.tp)
        if share.meets(decode.share(d_rank)) and decode.replica_index(d_rank, total) % num_lanes == lane
    ]
    d_heads = len(decode.heads(0, total))
    if source.order is Order.HEAD_MAJOR or d_heads == source.heads:
        overlaps = (_overlap(source, entries, own, d_rank, decode.heads(d_rank, total)) for d_rank in d_ranks)
        portions = tuple(portion for portion in overlaps if portion is not None)
        if kept.is_packed_on_the_way:
            rows = kept.entry_bytes, source.entry_bytes
            return RankMapping(
                unit, portions, replica_index, replicas, (), 0, 1, entries, *rows, packs=True, token_share=share
            )
        return RankMapping(unit, portions, replica_index, replicas, token_share=share)
    group = exchanged_heads(own.start, source.heads, d_heads)
    owners = range(group.start, group.stop, source.heads)
    ranks = tuple(prefill.holders(head, total, prefill.shares[rank])[replica] for head in owners)
    plane_row = d_heads * source.head_bytes
    return RankMapping(
        unit,
        tuple(
            UnitPortion(d_rank, entries * plane_row, plane=(heads.start - group.start) // d_heads)
            for d_rank in d_ranks
            if (heads := decode.heads(d_rank, total)).start in group
        ),
        replica_index,
        replicas,
        ranks if len(ranks) > 1 else (),
        owners.index(own.start),
        len(group) // d_heads,
        entries,
        source.entry_bytes,
        plane_row,
        token_share=share,
    )


def regroupable(geometries: Iterable[Geometry]) -> list[Geometry]:
    """Returns the geometries that a rank must regroup for some shapes of a decode engine."""
    return [g for g in geometries if g.sent.order is Order.TOKEN_MAJOR and g.total_heads > 1]


def slot_bytes(caches: RankCaches, step_tokens: int) -> int:
    """Returns the bytes of staging that one layer of a step of `step_tokens` takes; 0 if no layer can need it.

    That is what it takes after regrouping. Of a cache that is packed on the way it is what is sent, or one tensor as
    prefill keeps it if that is more.

    The result has a little room to spare: every request may end in a unit that is filled only in part, and the ranks
    of a group get equally many units. A step that does not fit is sent in several transfers.
    """
    movable = regroupable(caches.geometries)
    packed = [g for g in caches.geometries if g.is_packed_on_the_way]
    layers: dict[str, int] = {}
    for tensor in caches.tensors:
        geometry = caches.geometry_of(tensor)
        if geometry in movable or geometry in packed:
            layers[tensor.layer] = layers.get(tensor.layer, 0) + geometry.sent.entry_bytes
    largest_entry = max([*layers.values(), *(g.entry_bytes for g in packed)], default=0)
    largest_block = max((g.block_size for g in movable + packed), default=0)
    largest_group = max((g.total_heads // g.heads for g in movable), default=1)
    ranks = max((g.share.ranks for g in movable), default=1)  # all the same
    return (step_tokens // ranks + (1 + largest_group) * largest_block) * largest_entry


def why_slow(
    mapping: RankMapping, source: Geometry, prefill: Sharding, decode: Sharding, d_block_size: int
) -> str | None:
    """Returns why units are sent in small pieces, in words for the log; None if they are sent as whole blocks."""
    # If both sides divide tokens alike, neighbouring runs merge into whole blocks again.
    alike = decode.parts > 1 and (prefill.parts, prefill.interleave) == (decode.parts, decode.interleave)
    if mapping.unit < min(source.block_size, d_block_size) and not alike:
        return (
            f"KV lies in runs of {source.run} (prefill) and {decode.part(0).run(d_block_size)} (decode) tokens: it is "
            f"written {mapping.unit} tokens at a time, which is correct but slow; with context parallelism make "
            "cp_kv_cache_interleave_size the block size"
        )
    return None


def _common_unit(source: Geometry, share: TokenShare, decode: Sharding, d_block_size: int) -> int:
    run, d_run = share.run(source.block_size), decode.part(0).run(d_block_size)
    unit = math.gcd(run, d_run)
    if d_block_size % source.tokens_per_entry:
        raise LayoutError(
            f"decode's blocks are of {d_block_size} tokens, prefill has an entry for {source.tokens_per_entry} tokens"
        )
    if source.order is Order.HEAD_MAJOR and source.block_size != d_block_size:
        raise LayoutError(
            f"block sizes {source.block_size} (prefill) and {d_block_size} (decode): a head-major cache "
            "packs each head's tokens together, so both sides need the same block size"
        )
    if source.order is Order.HEAD_MAJOR and unit != d_block_size:
        raise LayoutError(
            f"runs of {run} (prefill) and {d_run} (decode) tokens in blocks of {d_block_size}: a head-major "
            "cache packs each head's tokens together, so cp_kv_cache_interleave_size must be the block size on both "
            "sides"
        )
    return unit


def _overlap(source: Geometry, entries: int, own: range, d_rank: int, theirs: range) -> UnitPortion | None:
    """Returns what goes straight from the cache to `d_rank`: the heads that both hold, in one run."""
    first, last = max(own.start, theirs.start), min(own.stop, theirs.stop)
    if first >= last:
        return None
    per_head = entries * source.head_bytes
    return UnitPortion(
        tp_rank=d_rank,
        nbytes=(last - first) * per_head,
        src_offset=(first - own.start) * per_head,
        dst_offset=(first - theirs.start) * per_head,
    )


@dataclass(frozen=True)
class Descriptors:
    """Copies as three arrays of equal length: source offset, destination offset, bytes."""

    src: Offsets
    dst: Offsets
    nbytes: Offsets


def descriptors(portion: UnitPortion, src_units: Offsets, dst_units: Offsets) -> Descriptors:
    """Returns the copies of this portion of every unit. Neighbouring copies are merged."""
    return merge(src_units + portion.src_offset, dst_units + portion.dst_offset, portion.nbytes)


def merge(src: Offsets, dst: Offsets, nbytes: int) -> Descriptors:
    """Merges copies of `nbytes` each that continue each other on both sides.

    Destinations must not overlap. Sources may repeat, but must not overlap in part.

    The result is minimal: a copy has at most one successor, which is its neighbour after sorting by either side. The
    copies are used in the order of their sources if no source repeats, and sorted by destination otherwise. Sources
    repeat if requests share a prefix in prefill's cache.
    """
    if len(src) == 0:
        return Descriptors(src, dst, src)
    if np.any(src[1:] <= src[:-1]) and np.any(dst[1:] < dst[:-1]):
        order = np.argsort(dst, kind="stable")
        src, dst = src[order], dst[order]
    starts_run = np.empty(len(src), dtype=np.bool_)
    starts_run[0] = True
    np.logical_or(src[1:] != src[:-1] + nbytes, dst[1:] != dst[:-1] + nbytes, out=starts_run[1:])
    if starts_run.all():
        return Descriptors(src, dst, np.full(len(src), nbytes, dtype=np.int64))
    first = np.flatnonzero(starts_run)
    count = np.diff(first, append=len(src))
    return Descriptors(src[first], dst[first], count * nbytes)
