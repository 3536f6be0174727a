# SPDX-License-Identifier: Apache-2.0
"""From a step of the scheduler's to shipments: once per step, before the first layer."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_ascend_pd.core.caches import RegisteredCaches
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.plan import Regroup, Route, make_route, why_slow
from vllm_ascend_pd.core.prefill_ticket import Destination, RankKey
from vllm_ascend_pd.core.rank_info import RankInfo
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import Sharding
from vllm_ascend_pd.device.base import Device, DeviceError
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.regroup import Regrouper
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.step_transfer import Item, StepTransfer
from vllm_ascend_pd.prefill.transfer import Transfer

logger = logging.getLogger(__name__)


# Decode engines of that many different shapes, times our geometries; tickets from outside name the shapes.
_MAX_ROUTES = 4096


@dataclass
class StepPlan:
    """What this rank does in one step, whose `number` is the same on all ranks: shipments by the geometry they read,
    layers that still have to be pushed, transfers whose prompt ends."""

    number: int = 0
    shipments: dict[int, list[tuple[Sender, StepTransfer]]] = field(default_factory=dict)
    unsaved: dict[str, None] = field(default_factory=dict)  # an ordered set
    last: list[Transfer] = field(default_factory=list)


class _Addressee(NamedTuple):
    """A decode engine as its tickets describe it, not as it answered: every rank must arrive at the same plan, whatever
    it has learnt so far (R5)."""

    issuer: tuple[str, str]
    sharding: Sharding
    block_sizes: tuple[int, ...]
    draft: str

    @classmethod
    def of(cls, ticket: Ticket) -> "_Addressee":
        return cls(ticket.issuer, ticket.sharding, tuple(ticket.remote_block_size), ticket.remote_draft)


class Planner:
    """`regrouper`: None where the layout never needs it."""

    def __init__(
        self, identity: RankInfo, caches: RegisteredCaches, device: Device, regrouper: Regrouper | None
    ) -> None:
        self._identity = identity
        self._caches = caches
        self._geometries = caches.description.geometries
        self._device = device
        self._regrouper = regrouper
        alike = caches.layers_by_geometry.values()
        # How many tensors of a layer lie alike at most, by geometry.
        self._parts = [
            max((len(of[g].tensors) for of in alike if g in of), default=0) for g in range(len(self._geometries))
        ]
        self._layers = [sum(g in of for of in alike) for g in range(len(self._geometries))]
        self._steps = 0  # all ranks get the same ones from the scheduler
        self._routes: dict[tuple[int, Sharding, tuple[int, ...]], Route] = {}
        self._warned_of_pieces = False

    def plan(self, sends: list[Send], transfers: Mapping[str, Transfer], senders: Mapping[str, Sender]) -> StepPlan:
        """The plan of a step that completes `sends`. `transfers` by request id, `senders` by ticket id."""
        self._steps += 1
        plan = StepPlan(self._steps)
        if not sends:
            return plan
        plan.unsaved = dict.fromkeys(self._caches.layers)
        items: dict[_Addressee, list[Item]] = {}
        for send in sends:
            transfer = transfers[send.request_id]
            if send.last:
                plan.last.append(transfer)
            if send.start >= send.stop:
                continue
            ticket = transfer.ticket
            items.setdefault(_Addressee.of(ticket), []).append(Item(transfer, send.start, send.stop, send.blocks))
        for decode, group in items.items():
            sender = senders[group[0].transfer.ticket.ticket_id]
            for index, geometry in enumerate(self._geometries):
                if not geometry.is_known_to(decode.draft):
                    continue
                shipment = self._make_shipment(index, decode.sharding, decode.block_sizes, group)
                if shipment is not None:
                    plan.shipments.setdefault(index, []).append((sender, shipment))
        return plan

    def _make_shipment(
        self, index: int, decode: Sharding, d_block_sizes: tuple[int, ...], items: list[Item]
    ) -> StepTransfer | None:
        geometry = self._geometries[index]
        try:
            route = self._route(index, decode, d_block_sizes)
        except ValueError as error:  # the two sides cannot fit
            for item in items:
                item.transfer.fail(str(error), PushFailure.UNFIT)
            return None
        served = [item for item in items if route.serves(item.transfer.ticket.replica_hash)]
        if not served:
            return None
        chunk_units = 0
        if route.regroup is not Regroup.NONE:
            assert self._regrouper is not None
            per_unit = self._parts[index] * route.planes * route.staged_bytes
            chunk_units = self._regrouper.slot_bytes // per_unit
            assert chunk_units > 0
        try:
            shipment = StepTransfer.build(route, geometry, served, self._device, chunk_units)
        except DeviceError as error:  # the side stream is broken
            self.missed(route, error)
            for item in served:
                item.transfer.fail(str(error), PushFailure.DEVICE)
            return None
        shipment.pushes = self._layers[index] * len(shipment.chunks)
        return shipment if len(shipment.src_units) > 0 else None

    def _route(self, index: int, decode: Sharding, d_block_sizes: tuple[int, ...]) -> Route:
        key = (index, decode, d_block_sizes)
        route = self._routes.get(key)
        if route is None:
            geometry = self._geometries[index]
            identity = self._identity
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            route = make_route(geometry, identity.rank, identity.sharding, decode, d_block_sizes[geometry.group])
            self._routes[key] = route
            slow = why_slow(route, geometry, identity.sharding, decode, d_block_sizes[geometry.group])
            if slow is not None and not self._warned_of_pieces:
                self._warned_of_pieces = True
                logger.warning("%s", slow)
        return route

    def destinations(self, layout: DecodeLayout, transfer: Transfer) -> dict[RankKey, Destination]:
        """The decode ranks this rank writes to for the ticket, and which of their tensors it covers."""
        ticket = transfer.ticket
        block_sizes = tuple(ticket.remote_block_size)
        routes = (
            (index, self._route(index, ticket.sharding, block_sizes))
            for index, geometry in enumerate(self._geometries)
            if geometry.is_known_to(ticket.remote_draft)
        )
        served = tuple((index, route) for index, route in routes if route.serves(ticket.replica_hash))
        covers = layout.covers(self._caches.description.tensors, served)
        return {key: Destination(rank, indices) for key, (rank, indices) in covers.items()}

    def missed(self, route: Route, error: DeviceError) -> None:
        """This rank does not take part in a collective of the route's."""
        if route.ranks:
            assert self._regrouper is not None
            self._regrouper.missed(route.ranks, str(error))
