# SPDX-License-Identifier: Apache-2.0
"""Resolves a step transfer into writes to decode ranks, once the addresses of their tensors are known.

All of it is pure, except that `Batches` reuses its memory for addresses. The sender's thread owns all of it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from vllm_ascend_pd.core.layout import Geometry, TokenShare
from vllm_ascend_pd.core.plan import Descriptors, Offsets, Regroup, Target, descriptors, staged_units
from vllm_ascend_pd.core.prefill_ticket import RankKey
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.prefill.decode_layout import LayerTarget, WriteShape
from vllm_ascend_pd.prefill.lease_check import LeaseCheck
from vllm_ascend_pd.prefill.step_transfer import StepTransfer
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.transport.batches import Batches, TransferLimits

_COMPUTED = attrgetter("computed")


@dataclass(frozen=True, eq=False)
class WritePlan:
    """One write to one decode rank for all requests of a step transfer.

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
    """The write plans of one step transfer, and the bytes that have arrived by them.

    The model's thread makes it with the step transfer. From then on the sender's thread owns it.
    """

    def __init__(self, step_transfer: StepTransfer, layers: int) -> None:
        """`layers`: how many layers will be pushed."""
        self._step_transfer = step_transfer
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


def resolve(step_transfer: StepTransfer, target: LayerTarget, limits: TransferLimits) -> WritePlan:
    """Returns the plan that writes all of `step_transfer` to the target's decode rank."""
    num_bytes = np.zeros(len(step_transfer.slices), dtype=np.int64)
    per_unit: Counter[TokenShare] = Counter()
    for share_of_unit, theirs in target.shape.parts:
        per_unit[theirs.share] += share_of_unit.rows * share_of_unit.nbytes
    for share, size in per_unit.items():
        owner = step_transfer.units.owner
        if share.ranks > 1:
            owner = owner[step_transfer.units.held(share)]
        num_bytes += np.bincount(owner, minlength=len(num_bytes)) * size
    return WritePlan(
        target.key,
        target.session,
        target.shape,
        batches_of(step_transfer, target.shape, limits),
        num_bytes,
        int(num_bytes.sum()),
        LeaseCheck(step_transfer.transfers, target.key),
        step_transfer.transfers,
    )


def batches_of(
    step_transfer: StepTransfer, shape: WriteShape, limits: TransferLimits, only: Collection[int] | None = None
) -> Batches:
    """Returns the copies of a step transfer, or of `only` some of its slices, in batches that respect `limits`."""
    distinct: list[tuple[Target, Geometry]] = []  # K and V are often the same
    for part in shape.parts:
        if part not in distinct:
            distinct.append(part)
    copies = [_copies(step_transfer, *part, only) for part in distinct]
    return Batches.cut([copies[distinct.index(part)] for part in shape.parts], limits)


def _copies(step_transfer: StepTransfer, target: Target, theirs: Geometry, only: Collection[int] | None) -> Descriptors:
    """Returns the copies to `target`, whose cache has the geometry `theirs`.

    Source offsets count from our tensor's block 0, or from the tensor's place in the staging slot. `DecodeLayout.unfit`
    has checked that the engine has the blocks that its tickets name.
    """
    units = step_transfer.units
    src = step_transfer.src_units
    if step_transfer.route.regroup is not Regroup.NONE:
        src = staged_units(step_transfer.route, target.plane, len(src), len(src))
    dst = units.offsets(step_transfer.d_blocks, theirs)
    owner = units.owner
    if theirs.share.ranks > 1:
        held = units.held(theirs.share)
        src, dst, owner = src[held], dst[held], owner[held]
    if only is not None:
        chosen = np.isin(owner, list(only))
        src, dst = src[chosen], dst[chosen]
    return descriptors(target, src, dst)
