# SPDX-License-Identifier: Apache-2.0
"""Plans a step: turns the scheduler's step into step transfers, once, before the first layer."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_ascend_pd.core.caches import RegisteredCaches
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.plan import Regroup
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import Sharding
from vllm_ascend_pd.device.base import Device, DeviceError
from vllm_ascend_pd.prefill.regroup import Regrouper
from vllm_ascend_pd.prefill.routes import Routes
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.step_transfer import RequestSlice, StepTransfer, plan_transfers
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.prefill.transfers import Transfers
from vllm_ascend_pd.prefill.write_plan import StepWrites


class Planned(NamedTuple):
    """A step transfer with its sender and its write plans."""

    sender: Sender
    step_transfer: StepTransfer
    writes: StepWrites


@dataclass(frozen=True)
class StepPlan:
    """What this rank does in one step. The model's thread owns it."""

    # The number of the step, which is the same on all ranks.
    number: int = 0
    # By the index of the geometry that is read.
    transfers: dict[int, list[Planned]] = field(default_factory=dict)
    # Layers that were not pushed yet, in order.
    unsaved: dict[str, None] = field(default_factory=dict)
    # Transfers whose prompt ends in this step.
    last: list[Transfer] = field(default_factory=list)


class TicketShape(NamedTuple):
    """A decode engine as its tickets describe it.

    Plans use this instead of the engine's description, because all ranks must make the same plan (R5), and a rank may
    not have the description yet.
    """

    issuer: tuple[str, str]
    sharding: Sharding
    block_sizes: tuple[int, ...]
    draft: str

    @classmethod
    def of(cls, ticket: Ticket) -> "TicketShape":
        block_sizes = tuple(ticket.remote_block_size)
        return cls(ticket.issuer, ticket.sharding, block_sizes, ticket.remote_draft)


class Planner:
    """Plans steps. The model's thread owns it."""

    def __init__(self, routes: Routes, caches: RegisteredCaches, device: Device, regrouper: Regrouper | None) -> None:
        """`regrouper`: None if this engine's layout never needs regrouping."""
        self._routes = routes
        self._caches = caches
        self._geometries = caches.description.geometries
        self._device = device
        self._regrouper = regrouper
        layers = caches.layers_by_geometry.values()
        # By geometry: the most tensors of it that a layer has.
        self._tensors_of_a_layer = [
            max((len(of[g].described) for of in layers if g in of), default=0) for g in range(len(self._geometries))
        ]
        # By geometry: how many layers have tensors of it.
        self._layers = [sum(g in of for of in layers) for g in range(len(self._geometries))]
        # The number of steps so far. It is the same on all ranks.
        self._steps = 0

    @owned
    def plan(self, sends: list[Send], transfers: Transfers) -> StepPlan:
        """Returns the plan of a step that completes `sends`."""
        self._steps += 1
        plan = StepPlan(self._steps)
        if not sends:
            return plan
        plan.unsaved.update(dict.fromkeys(self._caches.layers))
        slices: dict[TicketShape, list[RequestSlice]] = {}
        for send in sends:
            transfer = transfers[send.request_id]
            if send.last:
                plan.last.append(transfer)
            if send.start < send.stop:
                shape = TicketShape.of(transfer.ticket)
                slices.setdefault(shape, []).append(RequestSlice(transfer, send))
        for decode, group in slices.items():
            sender = group[0].transfer.sender
            for index, geometry in enumerate(self._geometries):
                if geometry.is_known_to(decode.draft):
                    for step_transfer in self._plan_geometry(index, decode, group):
                        planned = Planned(sender, step_transfer, StepWrites(step_transfer, self._layers[index]))
                        plan.transfers.setdefault(index, []).append(planned)
        return plan

    def _plan_geometry(self, index: int, decode: TicketShape, slices: list[RequestSlice]) -> list[StepTransfer]:
        try:
            route = self._routes.route(index, decode.sharding, decode.block_sizes)
        except ValueError as error:  # the two sides cannot fit
            for each in slices:
                each.transfer.fail(str(error), PushFailure.UNFIT)
            return []
        served = [each for each in slices if route.serves(each.transfer.ticket.replica_hash)]
        if not served:
            return []
        slot_units = 0
        if route.regroup is not Regroup.NONE:
            assert self._regrouper is not None
            unit_bytes = self._tensors_of_a_layer[index] * route.planes * route.staged_bytes
            slot_units = self._regrouper.slot_bytes // unit_bytes
            assert slot_units > 0
        try:
            return plan_transfers(route, self._geometries[index], served, self._device, slot_units)
        except DeviceError as error:  # the side stream is broken
            if self._regrouper is not None:
                self._regrouper.missed(route.ranks, str(error))
            for each in served:
                each.transfer.fail(str(error), PushFailure.DEVICE)
            return []
