# SPDX-License-Identifier: Apache-2.0
"""What one step sends to one decode engine from caches of one geometry: arrays over all requests.

The model's thread builds a `StepSend` before the step's first layer. Its arrays hold for every layer of the step. Once
the shape of decode's tensors is known, the sender's thread makes a `PagedWrite` of it. A `LayerPush` is one layer on
its way from the model's thread to the sender's.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from vllm_ascend_pd.core.layout import BlockKind, CacheTensor, Geometry
from vllm_ascend_pd.core.plan import (
    NULL_BLOCK,
    Descriptors,
    Offsets,
    RankMapping,
    UnitPortion,
    Units,
    descriptors,
)
from vllm_ascend_pd.core.prefill_ticket import Destination, PrefillTicket, RankKey
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.topology import Sharding
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.event import DeviceError, Event
from vllm_ascend_pd.prefill.decode_layout import LayerTarget
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.transport.batches import PagedWrite, TransferLimits


def tokens_of(send: Send, geometry: Geometry) -> tuple[int, int]:
    """Returns (start, stop) in tokens of `geometry`'s blocks. A state that is sent counts as one token.

    `start` is a multiple of both sides' blocks, so of their entries.
    """
    if geometry.kind is BlockKind.STATE:
        return 0, len(send.blocks[geometry.group])
    start, stop = send.tokens(geometry.group)
    return start, geometry.complete(stop)


@dataclass(eq=False)
class StepSend:
    """Units of several requests that have the same mapping. Regrouped units fit into one staging slot.

    The model's thread makes it. Afterwards the sender's thread owns `is_located`, `writes`, the private field and the
    methods that are `owned`. Nothing else changes.
    """

    mapping: RankMapping
    # How our caches lie in memory.
    geometry: Geometry
    transfers: Sequence[Transfer]
    # The units that this rank writes. Their owner is an index into `transfers`. There may be none if units are
    # regrouped: then this rank only takes part in the exchange.
    units: Units
    # `[units]`: where each unit is, in bytes from block 0 of our tensor, or from plane 0 of the staged tensor.
    src_units: Offsets
    # `[units]`: the id of the decode block that each unit goes to.
    d_blocks: Offsets
    # Where all units of the group are in our tensors, on the cache's device, int64. None unless units are regrouped.
    unit_offsets: torch.Tensor | None = None
    # Units in each plane of a staged tensor: the most that a rank of the group has.
    plane_units: int = 0
    # Where these units are in an exchanged tensor, on the device. None unless the exchanged heads are divided.
    plane_offsets: torch.Tensor | None = None
    # Guards which slot each of its layers has.
    slots_lock: threading.Lock = field(default_factory=lambda: threading.Lock())
    # Whether each request has its destinations, or has failed.
    is_located: bool = False
    # By the shape of a target: the write to each decode rank of each layer that has a target of this shape.
    writes: dict[int, PagedWrite] = field(default_factory=dict)
    # As `_at` returns it.
    _destinations: dict[RankKey, list[Destination | None]] = field(default_factory=dict)

    @cached_property
    def plane_bytes(self) -> int:
        """Bytes of a plane of a staged tensor."""
        return self.plane_units * self.mapping.staged_bytes

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of a staged tensor."""
        return self.mapping.planes * self.plane_bytes

    @cached_property
    def states(self) -> list[PrefillTicket]:
        """The state of each of `transfers`."""
        return [transfer.state for transfer in self.transfers]

    @cached_property
    def ticket_ids(self) -> list[str]:
        """The ticket id of each of `transfers`."""
        return [transfer.ticket.ticket_id for transfer in self.transfers]

    @property
    def has_failed(self) -> bool:
        """Whether all of its transfers have failed."""
        return all(transfer.state.failure is not None for transfer in self.transfers)

    @property
    def waits_for_grant(self) -> bool:
        return any(transfer.state.waits_for_grant for transfer in self.transfers)

    @property
    def decode_engine(self) -> str:
        return self.transfers[0].ticket.remote_engine_id

    def fail(self, reason: str, cause: PushFailure) -> None:
        for transfer in self.transfers:
            transfer.state.fail(reason, cause)

    def give_up_ungranted(self, reason: str) -> None:
        for transfer in self.transfers:
            if transfer.state.waits_for_grant:
                transfer.state.fail(reason, PushFailure.NO_GRANT)

    @owned
    def write_to(self, target: LayerTarget, limits: TransferLimits) -> PagedWrite:
        """Returns the write of all requests to `target`. It is the same for all targets with equal portions."""
        write = self.writes.get(target.portions_id)
        if write is None:
            write = self.writes[target.portions_id] = self.write_of(range(len(self.transfers)), target, limits)
        return write

    @owned
    def write_of(self, requests: Sequence[int], target: LayerTarget, limits: TransferLimits) -> PagedWrite:
        """Returns the write of some requests to `target`."""
        copies: dict[tuple[UnitPortion, Geometry], tuple[Descriptors, Offsets]] = {}  # K and V are often the same
        num_bytes = np.zeros(len(self.transfers), dtype=np.int64)
        for portion in target.portions:
            if portion not in copies:
                copies[portion] = self._copies(requests, *portion)
            num_bytes += copies[portion][1]
        return PagedWrite([copies[portion][0] for portion in target.portions], limits, num_bytes.tolist())

    def _copies(self, requests: Sequence[int], portion: UnitPortion, theirs: Geometry) -> tuple[Descriptors, Offsets]:
        """Returns some requests' copies to a decode tensor of the geometry `theirs`, and the bytes of each request.

        `portion`: what goes there of every unit. Source offsets count from our tensor's block 0, or from the tensor's
        place in the staging slot. `why_foreign` of `core/described_engine.py` has checked that the engine has the
        blocks that its tickets name.
        """
        src = self.src_units + portion.plane * self.plane_bytes
        dst, owner = self.units.offsets(self.d_blocks, theirs), self.units.owner
        if theirs.share.ranks > 1:
            held = self.units.held(theirs.share)
            src, dst, owner = src[held], dst[held], owner[held]
        if len(requests) < len(self.transfers):
            chosen = np.isin(owner, list(requests))
            src, dst, owner = src[chosen], dst[chosen], owner[chosen]
        return descriptors(portion, src, dst), np.bincount(owner, minlength=len(self.transfers)) * portion.nbytes

    @owned
    def writable_until(self, key: RankKey) -> float:
        """Returns until when all requests may be written to decode rank `key`: -inf if one has failed, or has no lease.

        It runs for each layer, so it calls no method of 32 requests: that takes 10 us.
        """
        for state in self.states:
            if state.failure is not None:
                return -math.inf
        return min([-math.inf if each is None else each.until for each in self._at(key)])

    def _at(self, key: RankKey) -> list[Destination | None]:
        """Where each request goes on decode rank `key`. None if the request failed before that was known."""
        there = self._destinations.get(key)
        if there is None:
            there = self._destinations[key] = [(state.destinations or {}).get(key) for state in self.states]
        return there

    @owned
    def lease_until(self, key: RankKey, requests: Sequence[int]) -> float:
        """Returns until when bytes of these requests may be sent to decode rank `key`."""
        return min(self.transfers[i].state.lease_until(key) for i in requests)

    @owned
    def count_delivered(self, key: RankKey, num_bytes: Sequence[int], delivered: Sequence[int]) -> None:
        """Counts the bytes of the `delivered` requests, which have arrived on decode rank `key`.

        `num_bytes`: of each request.
        """
        ends = {transfer.prompt_end for transfer in self.transfers}
        over = {end for end in ends if end is not None and end.is_done()}
        there = self._at(key)
        for i in delivered:
            destination = there[i]
            assert destination is not None
            destination.num_bytes += num_bytes[i]
            if not over or self.transfers[i].prompt_end not in over:
                destination.early_bytes += num_bytes[i]


def plan_sends(
    mapping: RankMapping,
    geometry: Geometry,
    slices: Sequence[tuple[Transfer, Send]],
    device: Device,
    slot_units: int,
) -> list[StepSend]:
    """Returns the step sends that send `slices` to one decode engine: tokens of requests, which become complete in one
    step.

    There is one, or several if units are regrouped and do not fit into one staging slot. `slot_units`: how many units
    are regrouped at a time. Raises `DeviceError`.

    The ranks of a group make the same sends, because they have the same slices and caches (R5). They differ only in
    which units each of them writes.
    """
    group = geometry.group
    transfers, of_requests = [transfer for transfer, _ in slices], [send for _, send in slices]
    ranges = [tokens_of(send, geometry) for send in of_requests]
    units = Units.of(mapping.unit, ranges)
    ticket = transfers[0].ticket  # all are for one decode engine, so its blocks are of one size
    span = ticket.span(group)
    firsts = [start // span for start, _ in ranges]
    d_ids = [
        transfer.ticket.remote_block_ids[group][first : -(-stop // span)]
        for transfer, first, (_, stop) in zip(transfers, firsts, ranges, strict=True)
    ]
    d_blocks = units.blocks(d_ids, firsts, span)
    # Decode's block table has the null block for tokens that have left its sliding window.
    wanted = d_blocks != NULL_BLOCK
    if mapping.token_share.ranks > 1:
        wanted &= units.held(mapping.token_share)
    if not wanted.all():
        units, d_blocks = units.cut(wanted), d_blocks[wanted]
    begins = [start // geometry.span for start, _ in ranges]
    p_blocks = units.blocks([send.blocks[group] for send in of_requests], begins, geometry.span)
    if (gone := p_blocks == NULL_BLOCK).any():
        for i in np.unique(units.owner[gone]):
            transfers[i].state.fail("decode wants tokens that have left prefill's sliding window", PushFailure.UNFIT)
    src_units = units.offsets(p_blocks, geometry)
    if len(src_units) == 0:
        return []
    if not mapping.is_staged:
        return [StepSend(mapping, geometry, transfers, units, src_units, d_blocks)]
    # Staged units may be in any order: in that of decode's blocks, most of them continue each other.
    order = _by_place(units, d_blocks, span, ticket.sharding)
    on_device = device.upload(torch.from_numpy(src_units[order]))
    sends = []
    for first in range(0, len(units), slot_units):
        chunk = slice(first, first + slot_units)
        offsets = on_device[chunk]
        most, mine = mapping.share(len(offsets))
        own = order[chunk][mine]
        staged = np.arange(len(own), dtype=np.int64) * mapping.staged_bytes
        split = None
        if mapping.ranks and mapping.planes > 1:
            split = device.upload(torch.arange(most) * (mapping.ratio * mapping.source_bytes))
        sends.append(
            StepSend(mapping, geometry, transfers, units.cut(own), staged, d_blocks[own], offsets, most, split)
        )
    return sends


def _by_place(units: Units, d_blocks: Offsets, span: int, decode: Sharding) -> Offsets:
    """Returns the order of units in which each decode rank gets its own by ascending addresses.

    Every unit has a place of its own among the `span` tokens of a decode block. So no order of equals matters, and
    NumPy's default sort, three times as fast as its stable one, gives all ranks the same order (R5).
    """
    places = d_blocks * span + units.tokens % span
    if decode.parts == 1:
        return np.argsort(places)
    order: Offsets = np.lexsort((places, units.tokens // decode.interleave % decode.parts))
    return order


@dataclass(frozen=True, eq=False)
class Slot:
    """A part of the staging ring's buffer (`prefill/regroup.py`)."""

    # Bytes from the start of the buffer.
    offset: int
    # In this process.
    address: int


@dataclass(slots=True)
class LayerPush:
    """The tensors of one layer that one step send reads, on their way from the model's thread to the sender's.

    The side stream hands over the staging slot of a regrouped layer, and the sender takes it for release. If the sender
    gives up first, the side stream keeps the slot.
    """

    layer: str
    step_send: StepSend
    tensors: Sequence[CacheTensor]
    # When the cache holds the step's tokens of this layer. The layer's attention may come later (`mark_cached`).
    computed: Event
    # When the bytes can be sent: after `computed`, and after checksums and regrouping if there are any.
    ready: Event
    # Where its token of the room in the sender's queue goes when its writes are over. None if it took none.
    room: queue.SimpleQueue[None] | None = None
    # When its first write began, on the monotonic clock.
    begun: float = 0.0
    # Until when a failed write may still read the bytes, in running time. 0 if no write has failed.
    settled_at: float = 0.0
    # Set by the sender's thread when all its writes are over. None if nobody waits for that.
    over: threading.Event | None = None
    # The two below change under `StepSend.slots_lock`. The staging slot that the bytes are read from. None if they are
    # read from the cache, and until the slot is filled.
    _slot: Slot | None = None
    _given_up: bool = False

    def fill(self, slot: Slot) -> bool:
        """Hands over a slot with the layer's bytes. Returns False if the sender has given up: keep it then."""
        with self.step_send.slots_lock:
            if not self._given_up:
                self._slot = slot
            return not self._given_up

    def take_staging_slot(self) -> Slot | None:
        """Returns the slot for release, if there is one. Nothing of the layer may be read any more."""
        with self.step_send.slots_lock:
            self._given_up = True
            return self._slot

    def has_left_cache(self, timeout_s: float) -> bool:
        """Whether the cache is not read any more, because the layer is in its staging slot or will never be. Waits for
        that as long. Only for a regrouped layer.
        """
        try:
            self.ready.wait(timeout_s)
        except TimeoutError:
            return False
        except DeviceError:  # nothing is sent: the requests fail
            return True
        return True

    def sources(self, target: LayerTarget) -> list[int]:
        """Returns the addresses that the source offsets of each of the target's portions count from."""
        if not self.step_send.mapping.is_staged:
            return [self.tensors[n].base for n in target.sources]
        assert self._slot is not None
        return [self._slot.address + n * self.step_send.tensor_bytes for n in target.sources]
