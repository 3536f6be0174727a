# SPDX-License-Identifier: Apache-2.0
"""A step's work for one decode engine and one cache geometry: the units of all requests, in one set of arrays.

Built once per step; every layer adds its base addresses and is done.
"""

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.layout import BlockKind, Geometry, TokenShare
from vllm_ascend_pd.core.plan import (
    NULL_BLOCK,
    Descriptors,
    Mask,
    Offsets,
    Regroup,
    Route,
    Target,
    descriptors,
    staged_units,
)
from vllm_ascend_pd.core.prefill_ticket import RankKey
from vllm_ascend_pd.core.units import Units
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.prefill.decode_layout import Course, Part
from vllm_ascend_pd.prefill.transfer import Leave, Transfer
from vllm_ascend_pd.transport.batches import Batches
from vllm_ascend_pd.transport.limits import TransferLimits

_COMPUTED = operator.attrgetter("computed")


@dataclass(frozen=True)
class Item:
    """Tokens `[start, stop)` of one request. `blocks`: this rank's ids per cache group, from block
    `start // span` on."""

    transfer: Transfer
    start: int
    stop: int
    blocks: tuple[list[int], ...]

    def tokens(self, geometry: Geometry) -> tuple[int, int]:
        """(start, stop) as blocks of `geometry` count: the state, if it is sent, is one token."""
        if geometry.kind is BlockKind.STATE:
            return 0, len(self.blocks[geometry.group])
        return self.start, self.stop


@dataclass(frozen=True, eq=False)
class Chunk:
    """Units `[first, stop)` of a shipment: as many as a staging slot holds, or all when nothing is staged."""

    first: int
    stop: int
    unit_offsets: torch.Tensor | None  # int64 on the cache's device, only where units are regrouped

    @property
    def count(self) -> int:
        return self.stop - self.first


@dataclass(eq=False)
class Parcel:
    """What of a chunk goes to decode rank `key` in one write, in `parts`, wherever tensors begin. `num_bytes`: of each
    item; `leave`: to write all of them; `early`: how often it has arrived whole before any of the prompts was computed
    to its end."""

    key: RankKey
    parts: tuple[Part, ...]
    batches: Batches
    num_bytes: Offsets
    leave: Leave
    early: int = 0

    @functools.cached_property
    def total(self) -> int:
        return int(self.num_bytes.sum())


@dataclass
class StepTransfer:
    """Items that travel by the same route. `units`: those that this rank holds and decode wants, by item; `src_units`
    `[units]`: where they are from our block 0 on, in bytes; `d_blocks` `[units]`: the block that decode has for each.
    `located`: of every item it is known where to write, or that it has failed. `pushes`: how many of it, a layer's
    chunk each, have not ended."""

    route: Route
    geometry: Geometry
    items: list[Item]
    units: Units
    src_units: Offsets
    d_blocks: Offsets
    chunks: list[Chunk] = field(default_factory=list)
    located: bool = False
    pushes: int = 0
    _d_units: dict[Geometry, Offsets] = field(default_factory=dict)
    _d_held: dict[TokenShare, Mask] = field(default_factory=dict)
    _parcels: dict[Chunk, list[Parcel]] = field(default_factory=dict)

    @functools.cached_property
    def transfers(self) -> list[Transfer]:
        return [item.transfer for item in self.items]

    @property
    def waits_for_grant(self) -> bool:
        return any(transfer.state.waits_for_grant for transfer in self.transfers)

    @property
    def decode_engine(self) -> str:
        return self.items[0].transfer.ticket.remote_engine_id

    def give_up_ungranted(self, reason: str) -> None:
        for transfer in self.transfers:
            if transfer.state.waits_for_grant:
                transfer.fail(reason, PushFailure.NO_GRANT)

    @classmethod
    def build(
        cls, route: Route, geometry: Geometry, items: list[Item], device: Device, chunk_units: int
    ) -> "StepTransfer":
        """`chunk_units`: how many units may be regrouped at once. Raises `DeviceError`."""
        group = geometry.group
        ranges = [item.tokens(geometry) for item in items]
        units = Units.of(route.unit, ranges)
        # All are for the same decode engine, whose blocks are of one size.
        span = items[0].transfer.ticket.span(group)
        firsts = [start // span for start, _ in ranges]
        d_ids = [
            item.transfer.ticket.remote_block_ids[group][first : -(-stop // span)]
            for item, first, (_, stop) in zip(items, firsts, ranges, strict=True)
        ]
        d_blocks = units.blocks(d_ids, firsts, span)
        # Of what has left a sliding window decode's block table has the null block.
        live = d_blocks != NULL_BLOCK
        if geometry.share.ranks > 1:
            live &= units.held(geometry.share)
        if not live.all():
            units, d_blocks = units.where(live), d_blocks[live]
        begins = [start // geometry.span for start, _ in ranges]
        p_blocks = units.blocks([item.blocks[group] for item in items], begins, geometry.span)
        if (gone := p_blocks == NULL_BLOCK).any():
            for i in np.unique(units.owner[gone]):
                items[i].transfer.fail("decode wants tokens that have left prefill's sliding window", PushFailure.UNFIT)
        shipment = cls(route, geometry, items, units, units.offsets(p_blocks, geometry), d_blocks)
        total = len(shipment.src_units)
        if route.regroup is Regroup.NONE:
            shipment.chunks.append(Chunk(0, total, None))
        else:
            offsets = device.upload(torch.from_numpy(shipment.src_units))
            for first in range(0, total, chunk_units):
                stop = min(total, first + chunk_units)
                these = offsets[first:stop] if stop - first < total else offsets
                shipment.chunks.append(Chunk(first, stop, these))
        return shipment

    def parcel(self, chunk: Chunk, course: Course, limits: TransferLimits) -> Parcel:
        """What of a chunk goes to one decode rank, for all layers that have such a course."""
        known = self._parcels.setdefault(chunk, [])
        for parcel in known:  # not by hash: that of the same geometry would be made for every layer
            if parcel.parts == course.parts and parcel.key == course.key:
                return parcel
        alike = next((parcel for parcel in known if parcel.parts == course.parts), None)  # another pipeline stage's
        if alike is not None:
            batches, num_bytes = alike.batches, alike.num_bytes
        else:
            batches = self.batches(chunk, course.parts, None, limits)
            num_bytes = self._num_bytes(chunk, course.parts)
        parcel = Parcel(course.key, course.parts, batches, num_bytes, Leave(self.transfers, course.key))
        known.append(parcel)
        return parcel

    def _num_bytes(self, chunk: Chunk, parts: tuple[Part, ...]) -> Offsets:
        per_unit: Counter[TokenShare] = Counter()
        for target, theirs in parts:
            per_unit[theirs.share] += target.rows * target.nbytes
        return functools.reduce(operator.add, (self._units(chunk, share) * size for share, size in per_unit.items()))

    def arrived(self, parcel: Parcel, delivered: Sequence[int]) -> None:
        """The `delivered` items of a parcel have."""
        if len(delivered) == len(self.items) and not any(map(_COMPUTED, self.transfers)):
            parcel.early += 1  # the transfers are told after the last push
            return
        ends = {transfer.computed for transfer in self.transfers}
        over = {end for end in ends if end is not None and end.is_done()}
        for i in delivered:
            transfer, num_bytes = self.transfers[i], int(parcel.num_bytes[i])
            transfer.wrote(parcel.key, num_bytes, 0 if transfer.computed in over else num_bytes)

    def push_ended(self) -> None:
        self.pushes -= 1
        if self.pushes:
            return
        for parcel in [parcel for known in self._parcels.values() for parcel in known if parcel.early]:
            for transfer, num_bytes in zip(self.transfers, parcel.num_bytes.tolist(), strict=True):
                transfer.wrote(parcel.key, parcel.early * num_bytes, parcel.early * num_bytes)

    def batches(
        self, chunk: Chunk, parts: tuple[Part, ...], only: frozenset[int] | None, limits: TransferLimits
    ) -> Batches:
        """Of `only` the items named, or of all."""
        distinct: list[Part] = []  # K and V often go alike
        for part in parts:
            if part not in distinct:
                distinct.append(part)
        copies = [self._copies(chunk, *part, only) for part in distinct]
        return Batches.cut([copies[distinct.index(part)] for part in parts], limits)

    def _copies(self, chunk: Chunk, target: Target, theirs: Geometry, only: frozenset[int] | None) -> Descriptors:
        """The copies of a chunk to `target`, whose cache lies as `theirs` says; `only` the items named, or all.

        Source offsets count from the tensor's block 0, or from the chunk's place in the staging slot.
        """
        if self.route.regroup is Regroup.NONE:
            src = self.src_units[chunk.first : chunk.stop]
        else:
            src = staged_units(self.route, target.plane, chunk.count, chunk.count)
        dst = self._destination_units(theirs)[chunk.first : chunk.stop]
        owner = self.units.owner[chunk.first : chunk.stop]
        if theirs.share.ranks > 1:
            held = self._held_by(theirs.share)[chunk.first : chunk.stop]
            src, dst, owner = src[held], dst[held], owner[held]
        if only is not None:
            chosen = np.isin(owner, list(only))
            src, dst = src[chosen], dst[chosen]
        return descriptors(target, src, dst)

    def _units(self, chunk: Chunk, share: TokenShare) -> Offsets:
        """How many units of the chunk each item has for a decode rank with `share` of the tokens."""
        owner = self.units.owner[chunk.first : chunk.stop]
        if share.ranks > 1:
            owner = owner[self._held_by(share)[chunk.first : chunk.stop]]
        return np.bincount(owner, minlength=len(self.items))

    def _held_by(self, share: TokenShare) -> Mask:
        held = self._d_held.get(share)
        if held is None:
            held = self._d_held[share] = self.units.held(share)
        return held

    def _destination_units(self, theirs: Geometry) -> Offsets:
        """Nothing is written to an engine whose blocks are not as its tickets say (`DecodeLayout.unfit`)."""
        units = self._d_units.get(theirs)
        if units is None:
            units = self._d_units[theirs] = self.units.offsets(self.d_blocks, theirs)
        return units
