# SPDX-License-Identifier: Apache-2.0
"""What one step sends to one decode engine from caches of one geometry: arrays over all requests.

The model's thread builds a `StepSend` before the step's first layer. Nothing changes it afterwards: its arrays hold for
every layer of the step. Once the addresses of decode's tensors are known, the sender's thread resolves it into a
`WritePlan` for each decode rank. A `LayerPush` is one layer on its way from the model's thread to the sender's.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch

from vllm_ascend_pd.core.layout import BlockKind, CacheTensor, Geometry, TokenShare
from vllm_ascend_pd.core.plan import (
    NULL_BLOCK,
    Descriptors,
    Offsets,
    Route,
    Target,
    Units,
    descriptors,
)
from vllm_ascend_pd.core.prefill_ticket import RankKey
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.topology import Sharding
from vllm_ascend_pd.device.base import Device, Event
from vllm_ascend_pd.prefill.decode_layout import LayerTarget, WriteShape
from vllm_ascend_pd.prefill.staging import StagedLayer
from vllm_ascend_pd.prefill.transfer import LeaseCheck, Transfer
from vllm_ascend_pd.transport.batches import Batches, TransferLimits


@dataclass(frozen=True)
class RequestSlice:
    """Tokens of one request, which become complete in one step."""

    transfer: Transfer
    # The tokens, and this rank's block ids.
    send: Send

    def tokens(self, geometry: Geometry) -> tuple[int, int]:
        """Returns (start, stop) in tokens of `geometry`'s blocks. A state that is sent counts as one token.

        `start` is a multiple of both sides' blocks, so of their entries.
        """
        if geometry.kind is BlockKind.STATE:
            return 0, len(self.send.blocks[geometry.group])
        start, stop = self.send.tokens(geometry.group)
        return start, geometry.complete(stop)


@dataclass(frozen=True, eq=False)
class StepSend:
    """Units of several requests that are sent by one route. Regrouped units fit into one staging slot."""

    route: Route
    # How our caches lie in memory.
    geometry: Geometry
    slices: Sequence[RequestSlice]
    # The units that this rank writes. Their owner is an index into `slices`. There may be none if units are regrouped:
    # then this rank only takes part in the exchange.
    units: Units
    # `[units]`: where each unit is, in bytes from block 0 of our tensor, or from plane 0 of the staged tensor.
    src_units: Offsets
    # `[units]`: the id of the decode block that each unit goes to.
    d_blocks: Offsets
    # Where all units of the group are in our tensors, on the cache's device, int64. None unless units are regrouped.
    unit_offsets: torch.Tensor | None = None
    # Units in each plane of a staged tensor: the largest share of a rank of the group.
    share: int = 0
    # Where the units of a share are in an exchanged tensor, on the device. None unless the exchanged heads are divided.
    share_offsets: torch.Tensor | None = None

    @cached_property
    def plane_bytes(self) -> int:
        """Bytes of a plane of a staged tensor."""
        return self.share * self.route.staged_bytes

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of a staged tensor."""
        return self.route.planes * self.plane_bytes

    @cached_property
    def transfers(self) -> list[Transfer]:
        """The transfer of each of `slices`."""
        return [each.transfer for each in self.slices]

    @cached_property
    def ticket_ids(self) -> list[str]:
        """The ticket id of each of `slices`."""
        return [each.transfer.ticket.ticket_id for each in self.slices]

    @property
    def has_failed(self) -> bool:
        """Whether all of its transfers have failed."""
        return all(transfer.failure is not None for transfer in self.transfers)

    @property
    def waits_for_grant(self) -> bool:
        return any(transfer.waits_for_grant for transfer in self.transfers)

    @property
    def decode_engine(self) -> str:
        return self.slices[0].transfer.ticket.remote_engine_id

    def fail(self, reason: str, cause: PushFailure) -> None:
        for transfer in self.transfers:
            transfer.fail(reason, cause)

    def give_up_ungranted(self, reason: str) -> None:
        for transfer in self.transfers:
            if transfer.waits_for_grant:
                transfer.fail(reason, PushFailure.NO_GRANT)


def plan_sends(
    route: Route,
    geometry: Geometry,
    slices: Sequence[RequestSlice],
    device: Device,
    slot_units: int,
) -> list[StepSend]:
    """Returns the step sends that send `slices` to one decode engine.

    There is one, or several if units are regrouped and do not fit into one staging slot. `slot_units`: how many units
    are regrouped at a time. Raises `DeviceError`.

    The ranks of a group make the same sends, because they have the same slices and caches (R5). They differ only in
    which units each of them writes.
    """
    group = geometry.group
    ranges = [each.tokens(geometry) for each in slices]
    units = Units.of(route.unit, ranges)
    # All are for one decode engine, so its blocks are of one size.
    span = slices[0].transfer.ticket.span(group)
    firsts = [start // span for start, _ in ranges]
    d_ids = [
        each.transfer.ticket.remote_block_ids[group][first : -(-stop // span)]
        for each, first, (_, stop) in zip(slices, firsts, ranges, strict=True)
    ]
    d_blocks = units.blocks(d_ids, firsts, span)
    # Decode's block table has the null block for tokens that have left its sliding window.
    wanted = d_blocks != NULL_BLOCK
    if geometry.share.ranks > 1:
        wanted &= units.held(geometry.share)
    if not wanted.all():
        units, d_blocks = units.where(wanted), d_blocks[wanted]
    begins = [start // geometry.span for start, _ in ranges]
    p_blocks = units.blocks([each.send.blocks[group] for each in slices], begins, geometry.span)
    if (gone := p_blocks == NULL_BLOCK).any():
        for i in np.unique(units.owner[gone]):
            slices[i].transfer.fail("decode wants tokens that have left prefill's sliding window", PushFailure.UNFIT)
    src_units = units.offsets(p_blocks, geometry)
    if len(src_units) == 0:
        return []
    if not route.is_staged:
        return [StepSend(route, geometry, slices, units, src_units, d_blocks)]
    # Staged units may be in any order: in that of decode's blocks, most of them continue each other.
    order = _by_place(units, d_blocks, slices[0].transfer.ticket.sharding)
    units, d_blocks = units.cut(order), d_blocks[order]
    on_device = device.upload(torch.from_numpy(src_units[order]))
    sends = []
    for first in range(0, len(units), slot_units):
        chunk = slice(first, first + slot_units)
        offsets = on_device[chunk]
        most, mine = route.share(len(offsets))
        own, own_blocks = units.cut(chunk).cut(mine), d_blocks[chunk][mine]
        staged = np.arange(len(own), dtype=np.int64) * route.staged_bytes
        split = None
        if route.ranks and route.planes > 1:
            split = device.upload(torch.arange(most) * (route.ratio * route.source_bytes))
        sends.append(StepSend(route, geometry, slices, own, staged, own_blocks, offsets, most, split))
    return sends


def _by_place(units: Units, d_blocks: Offsets, decode: Sharding) -> Offsets | slice:
    """Returns the order of units in which each decode rank gets its own by ascending addresses."""
    if decode.parts == 1 and np.all(d_blocks[1:] >= d_blocks[:-1]):
        return slice(None)  # units of one block are in order already
    order: Offsets = np.lexsort((units.tokens, d_blocks, units.tokens // decode.interleave % decode.parts))
    return order


# Resolves a step send into writes to decode ranks, once the addresses of their tensors are known.
#
# All of it is pure, except that `Batches` reuses its memory for addresses. The sender's thread owns all of it.

_COMPUTED = attrgetter("computed")


@dataclass(frozen=True, eq=False)
class WritePlan:
    """One write to one decode rank for all requests of a step send.

    It holds for every layer with targets of this shape: a layer only adds the addresses of its tensors.
    """

    key: RankKey
    # The decode rank's Mooncake session.
    session: str
    shape: WriteShape
    # Source offsets, destination offsets and lengths, in batches that Mooncake can take.
    batches: Batches
    # `[requests]`: how many bytes of each request it writes.
    num_bytes: Offsets
    total_bytes: int
    lease: LeaseCheck
    # By index into `num_bytes`.
    transfers: Sequence[Transfer]

    def to(self, target: LayerTarget) -> "WritePlan":
        """Returns the plan for another decode rank, whose targets have the same shape."""
        lease = LeaseCheck(self.transfers, target.key)
        return dataclasses.replace(self, key=target.key, session=target.session, lease=lease)


class StepWrites:
    """The write plans of one step send, and the bytes that have arrived by them.

    The model's thread makes it with the step send. From then on the sender's thread owns it.
    """

    def __init__(self, step_send: StepSend, layers: int) -> None:
        """`layers`: how many layers will be pushed."""
        self._step_transfer = step_send
        self._plans: dict[tuple[RankKey, WriteShape], WritePlan] = {}
        # How often all bytes of a plan have arrived before a prompt's last layer was computed. The bytes are added up
        # once a step: doing it for each layer of 32 requests adds a seventh to the sender's time (71 to 81
        # microseconds, benchmarks/plan.py).
        self._early: dict[WritePlan, int] = {}
        self._layers_left = layers
        # Whether each request has its destinations, or has failed.
        self._located = False

    @owned
    def await_destinations(self, before_waiting: Callable[[], None]) -> None:
        """Waits until each request has its destinations or has failed. Calls `before_waiting` first."""
        if not self._located:
            before_waiting()
            for transfer in self._step_transfer.transfers:
                transfer.await_destinations()
            self._located = True

    @owned
    def plan_for(self, target: LayerTarget, limits: TransferLimits) -> WritePlan:
        """Returns the plan for all layers with such a target. The first layer resolves it."""
        plan = self._plans.get((target.key, target.shape))
        if plan is None:
            alike = next((known for known in self._plans.values() if known.shape is target.shape), None)
            plan = resolve(self._step_transfer, target, limits) if alike is None else alike.to(target)
            self._plans[target.key, target.shape] = plan
        return plan

    @owned
    def arrived(self, plan: WritePlan, delivered: Sequence[int]) -> None:
        """Counts the bytes of the `delivered` slices, which have arrived."""
        transfers = plan.transfers
        if len(delivered) == len(transfers) and not any(map(_COMPUTED, transfers)):
            self._early[plan] = self._early.get(plan, 0) + 1
            return
        ends = {transfer.computed for transfer in transfers}
        over = {end for end in ends if end is not None and end.is_done()}
        for i in delivered:
            num_bytes = int(plan.num_bytes[i])
            transfers[i].wrote(plan.key, num_bytes, 0 if transfers[i].computed in over else num_bytes)

    @owned
    def layer_ended(self) -> None:
        """Counts a layer whose writes are over. After the last one, adds up the bytes that arrived early."""
        self._layers_left -= 1
        if self._layers_left == 0:
            for plan, times in self._early.items():
                for transfer, num_bytes in zip(plan.transfers, plan.num_bytes.tolist(), strict=True):
                    transfer.wrote(plan.key, times * num_bytes, times * num_bytes)


def resolve(step_send: StepSend, target: LayerTarget, limits: TransferLimits) -> WritePlan:
    """Returns the plan that writes all of `step_send` to the target's decode rank."""
    num_bytes = np.zeros(len(step_send.slices), dtype=np.int64)
    per_unit: Counter[TokenShare] = Counter()
    for share_of_unit, theirs in target.shape.parts:
        per_unit[theirs.share] += share_of_unit.nbytes
    for share, size in per_unit.items():
        owner = step_send.units.owner
        if share.ranks > 1:
            owner = owner[step_send.units.held(share)]
        num_bytes += np.bincount(owner, minlength=len(num_bytes)) * size
    return WritePlan(
        target.key,
        target.session,
        target.shape,
        batches_of(step_send, target.shape, limits),
        num_bytes,
        int(num_bytes.sum()),
        LeaseCheck(step_send.transfers, target.key),
        step_send.transfers,
    )


def batches_of(
    step_send: StepSend, shape: WriteShape, limits: TransferLimits, only: Collection[int] | None = None
) -> Batches:
    """Returns the copies of a step send, or of `only` some of its slices, in batches that respect `limits`."""
    distinct: list[tuple[Target, Geometry]] = []  # K and V are often the same
    for part in shape.parts:
        if part not in distinct:
            distinct.append(part)
    copies = [_copies(step_send, *part, only) for part in distinct]
    return Batches.cut([copies[distinct.index(part)] for part in shape.parts], limits)


def _copies(step_send: StepSend, target: Target, theirs: Geometry, only: Collection[int] | None) -> Descriptors:
    """Returns the copies to `target`, whose cache has the geometry `theirs`.

    Source offsets count from our tensor's block 0, or from the tensor's place in the staging slot. `DecodeLayout.unfit`
    has checked that the engine has the blocks that its tickets name.
    """
    units = step_send.units
    src = step_send.src_units + target.plane * step_send.plane_bytes
    dst = units.offsets(step_send.d_blocks, theirs)
    owner = units.owner
    if theirs.share.ranks > 1:
        held = units.held(theirs.share)
        src, dst, owner = src[held], dst[held], owner[held]
    if only is not None:
        chosen = np.isin(owner, list(only))
        src, dst = src[chosen], dst[chosen]
    return descriptors(target, src, dst)


@dataclass(slots=True)
class LayerPush:
    """The tensors of one layer that one step send reads."""

    layer: str
    step_send: StepSend
    writes: StepWrites
    tensors: Sequence[CacheTensor]
    # When the bytes can be read.
    ready: Event
    # The staging slot that they are read from. None if they are read from the cache.
    staged: StagedLayer | None = None
    # When its first write began, on the monotonic clock.
    begun: float = 0.0
    # Until when a failed write may still read the bytes, in running time. 0 if no write has failed.
    settled_at: float = 0.0

    def sources(self, target: LayerTarget) -> list[int]:
        """Returns the addresses that the source offsets of each part of the target's shape count from."""
        if self.staged is None:
            return [self.tensors[n].base for n in target.sources]
        return [self.staged.address(n) for n in target.sources]
