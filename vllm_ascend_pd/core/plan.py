# SPDX-License-Identifier: Apache-2.0
"""Plans what one prefill rank sends of a step: turns block ids into copies, as arrays of byte offsets.

A `Route` says, once per decode engine's shape and cache geometry, what happens to every unit of KV on its way: whether
it is regrouped, and which bytes of it go to which decode ranks. A unit is the longest run of tokens that lies within
one block on either side. Per step only block ids change, per layer only base addresses. So all layers share routes and
offsets.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.core.layout import Geometry, LayoutError, Order, RankCaches, TokenShare
from vllm_ascend_pd.core.topology import Sharding, holders


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
        # Of each request's units: what its first token is more than its place among all units says.
        ahead = [start - begin * unit for (start, _), begin in zip(ranges, begins, strict=False)]
        owner = np.repeat(np.arange(len(ranges), dtype=np.int64), counts)
        return cls(np.arange(len(owner), dtype=np.int64) * unit + _integers(ahead)[owner], owner)

    def __len__(self) -> int:
        return len(self.tokens)

    def where(self, mask: Mask) -> Units:
        return Units(self.tokens[mask], self.owner[mask])

    def cut(self, at: slice) -> Units:
        """Returns the units at these places."""
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


class Regroup(enum.Enum):
    """What the sender does to units before it writes them."""

    NONE = "none"  # units are written straight from the paged cache
    GATHER = "gather"  # an all-to-all brings the heads of several prefill ranks together
    SPLIT = "split"  # the heads of this rank are divided among several decode ranks


@dataclass(frozen=True)
class Target:
    """The part of every source unit that goes to one decode rank: `rows` runs of `nbytes`.

    Offsets count from the start of the unit, on either side, in bytes.
    """

    # The decode rank.
    tp_rank: int
    # Bytes of one run.
    nbytes: int
    # The staging plane that the bytes come from. Always 0 unless the route splits.
    plane: int = 0
    # Where the first run begins in the source unit.
    src_offset: int = 0
    # Where it goes in decode's unit.
    dst_offset: int = 0
    # How many runs there are.
    rows: int = 1
    # From the start of one run to the start of the next, in the source unit.
    src_pitch: int = 0
    # The same in decode's unit.
    dst_pitch: int = 0


@dataclass(frozen=True)
class Route:
    """How units of one geometry travel from one prefill rank to a decode engine.

    If several prefill ranks hold the same KV, each serves the tickets whose `replica_hash` selects its index.
    """

    regroup: Regroup
    # Tokens of a unit.
    unit: int
    targets: tuple[Target, ...]
    # The index of this rank among the ranks that hold the same KV.
    replica_index: int = 0
    # How many ranks hold the same KV.
    replicas: int = 1
    # Bytes of a unit in each plane of a staging slot. 0 if nothing is staged.
    staged_bytes: int = 0
    # How many planes a staging slot has for a tensor.
    planes: int = 1
    # The ranks of the all-to-all group, in the order of their heads.
    ranks: tuple[int, ...] = ()
    # This rank's index in the group.
    index: int = 0
    # Bytes of one entry on the side with fewer heads: the run that regrouping moves.
    row_bytes: int = 0

    @property
    def pieces(self) -> int:
        """The most runs in which a target gets its share of a unit: more than one if rows are written one by one."""
        return max((target.rows for target in self.targets), default=0)

    def serves(self, replica_hash: int) -> bool:
        return replica_hash % self.replicas == self.replica_index


def make_route(source: Geometry, rank: int, prefill: Sharding, decode: Sharding, d_block_size: int) -> Route:
    """Returns the route of `source`'s units from prefill's `rank` to a decode engine.

    `d_block_size`: tokens in decode's blocks. Raises LayoutError or TopologyError if the two sides cannot fit.
    """
    total = source.total_heads
    copies, replica = prefill.replicas(total), prefill.replica_index(rank, total)
    decode.replicas(total)  # raises
    d_heads = len(decode.heads(0, total))
    unit = _common_unit(source, decode, d_block_size)
    # Units begin and end with entries: both sides' blocks hold whole ones.
    entries = unit // source.tokens_per_entry
    head = source.head_bytes
    own = prefill.heads(rank, total)
    if source.order is Order.TOKEN_MAJOR and d_heads > source.heads and d_heads % source.heads == 0:
        ratio = d_heads // source.heads
        if entries % ratio == 0:
            owner = own.start // source.heads
            first = owner - owner % ratio
            staged = entries // ratio * d_heads * head
            index = owner - first
            # As many heads are on no other decode rank, so this one has all tokens.
            target = Target(tp_rank=owner // ratio, nbytes=staged, dst_offset=index * staged)
            share = prefill.shares[rank]
            ranks = tuple(prefill.holders(o * source.heads, total, share)[replica] for o in range(first, first + ratio))
            return Route(Regroup.GATHER, unit, (target,), replica, copies, staged, 1, ranks, index, source.entry_bytes)
    if source.order is Order.TOKEN_MAJOR and source.heads > d_heads and source.heads % d_heads == 0:
        row = d_heads * head
        targets = tuple(
            Target(tp_rank=d_rank, nbytes=entries * row, plane=plane)
            for plane in range(source.heads // d_heads)
            for d_rank in holders(own[plane * d_heads], decode.tp, total)
            if source.share.meets(decode.share(d_rank))
        )
        return Route(
            Regroup.SPLIT, unit, targets, replica, copies, entries * row, source.heads // d_heads, row_bytes=row
        )
    overlaps = (
        _overlap(source, entries, own, d_rank, decode.heads(d_rank, total))
        for d_rank in range(decode.tp)
        if source.share.meets(decode.share(d_rank))
    )
    targets = tuple(target for target in overlaps if target is not None)
    return Route(Regroup.NONE, unit, targets, replica, copies)


def regroupable(geometries: Iterable[Geometry]) -> list[Geometry]:
    """Returns the geometries that a rank must regroup for some shapes of a decode engine."""
    return [g for g in geometries if g.order is Order.TOKEN_MAJOR and g.total_heads > 1]


def slot_bytes(caches: RankCaches, step_tokens: int) -> int:
    """Returns the bytes that one layer of a step of `step_tokens` takes after regrouping; 0 if no layer can need it.

    The result has a little room to spare, since every request may end in a unit that is filled only in part. A step
    that does not fit is sent in several transfers.
    """
    movable = regroupable(caches.geometries)
    layers: dict[str, int] = {}
    for tensor in caches.tensors:
        geometry = caches.geometry_of(tensor)
        if geometry in movable:
            layers[tensor.layer] = layers.get(tensor.layer, 0) + geometry.entry_bytes
    largest_block = max((g.block_size for g in movable), default=0)
    ranks = max((g.share.ranks for g in movable), default=1)  # all the same
    return (step_tokens // ranks + 2 * largest_block) * max(layers.values(), default=0)


def why_slow(route: Route, source: Geometry, prefill: Sharding, decode: Sharding, d_block_size: int) -> str | None:
    """Returns why units are sent in small pieces, in words for the log; None if they are sent as whole blocks."""
    if route.pieces > 1:
        return (
            f"tensor-parallel sizes {prefill.tp} (prefill) and {decode.tp} (decode) do not divide each other's "
            f"{source.total_heads} KV heads evenly: KV is written in {route.pieces} pieces per {route.unit} tokens of "
            "a layer, which is correct but slow"
        )
    # If both sides divide tokens alike, neighbouring runs merge into whole blocks again.
    alike = decode.parts > 1 and (prefill.parts, prefill.interleave) == (decode.parts, decode.interleave)
    if route.unit < min(source.block_size, d_block_size) and not alike:
        return (
            f"KV lies in runs of {source.run} (prefill) and {decode.part(0).run(d_block_size)} (decode) tokens: it is "
            f"written {route.unit} tokens at a time, which is correct but slow; with context parallelism make "
            "cp_kv_cache_interleave_size the block size"
        )
    return None


def _common_unit(source: Geometry, decode: Sharding, d_block_size: int) -> int:
    d_run = decode.part(0).run(d_block_size)
    unit = math.gcd(source.run, d_run)
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
            f"runs of {source.run} (prefill) and {d_run} (decode) tokens in blocks of {d_block_size}: a head-major "
            "cache packs each head's tokens together, so cp_kv_cache_interleave_size must be the block size on both "
            "sides"
        )
    return unit


def _overlap(source: Geometry, entries: int, own: range, d_rank: int, theirs: range) -> Target | None:
    """Returns what goes straight from the cache to `d_rank`: the heads that both hold, in as few runs as possible."""
    first, last = max(own.start, theirs.start), min(own.stop, theirs.stop)
    if first >= last:
        return None
    head = source.head_bytes
    if source.order is Order.TOKEN_MAJOR and own != theirs:
        return Target(
            tp_rank=d_rank,
            nbytes=(last - first) * head,
            src_offset=(first - own.start) * head,
            dst_offset=(first - theirs.start) * head,
            rows=entries,
            src_pitch=len(own) * head,
            dst_pitch=len(theirs) * head,
        )
    per_head = entries * head
    return Target(
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

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


def descriptors(target: Target, src_units: Offsets, dst_units: Offsets) -> Descriptors:
    """Returns the copies that bring every unit's share to `target`. Neighbouring copies are merged."""
    src = src_units + target.src_offset
    dst = dst_units + target.dst_offset
    if target.rows > 1:
        rows = np.arange(target.rows, dtype=np.int64)
        src = (src[:, None] + rows * target.src_pitch).ravel()
        dst = (dst[:, None] + rows * target.dst_pitch).ravel()
    return merge(src, dst, target.nbytes)


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


def staged_units(route: Route, plane: int, capacity: int, count: int) -> Offsets:
    """Returns the offsets of `count` units in `plane` of a staging buffer whose planes hold `capacity` units each."""
    return (plane * capacity + np.arange(count, dtype=np.int64)) * route.staged_bytes


def concatenate(parts: Sequence[Offsets]) -> Offsets:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
