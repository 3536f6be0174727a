# SPDX-License-Identifier: Apache-2.0
"""The prefill side of a worker: plans each step, and pushes each layer as soon as it is computed."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_ascend_pd.config import ConnectorConfig
from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.compatibility import mismatch
from vllm_ascend_pd.core.plan import Regroup, Route, make_route, regroupable, slot_bytes, why_slow
from vllm_ascend_pd.core.producer_ticket import Destination, ProducerTicket, RankKey
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.device.base import Device, DeviceError, Event
from vllm_ascend_pd.step import ProducerStep, WorkerReport
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.worker.caches import RegisteredCaches
from vllm_ascend_pd.worker.identity import Identity
from vllm_ascend_pd.worker.peer import DecodeLayout
from vllm_ascend_pd.worker.peers import Peers
from vllm_ascend_pd.worker.regroup import Regrouper
from vllm_ascend_pd.worker.sender import Barrier, Finish, LayerPush, Sender, Source
from vllm_ascend_pd.worker.shipment import Item, Shipment
from vllm_ascend_pd.worker.staging import StagingRing
from vllm_ascend_pd.worker.transfer import Transfer

logger = logging.getLogger(__name__)


@dataclass
class _StepPlan:
    """What this rank does in one step: shipments by the geometry they read, layers that still have to be pushed,
    transfers whose prompt ends."""

    shipments: dict[int, list[tuple[Sender, Shipment]]] = field(default_factory=dict)
    unsaved: dict[str, None] = field(default_factory=dict)  # an ordered set
    last: list[Transfer] = field(default_factory=list)


class ProducerWorker:
    """`step_tokens`: most tokens one step computes, which sizes the staging ring."""

    def __init__(
        self,
        identity: Identity,
        config: ConnectorConfig,
        device: Device,
        engine: TransferEngine,
        caches: RegisteredCaches,
        step_tokens: int,
    ) -> None:
        self._identity = identity
        self._config = config
        self._device = device
        self._engine = engine
        self._caches = caches
        self._geometries = caches.description.geometries
        self._ring, self._regrouper = self._make_regrouper(step_tokens)
        # layer -> geometry -> indices of the layer's tensors that lie so; and how many at most of each geometry
        self._by_geometry = {layer: self._group_by_geometry(indices) for layer, indices in caches.layers.items()}
        self._parts = [
            max((len(groups.get(g, ())) for groups in self._by_geometry.values()), default=0)
            for g in range(len(self._geometries))
        ]
        self._connected: set[tuple[int, ...]] = set()
        self._routes: dict[tuple[int, topology.Sharding, tuple[int, ...]], Route] = {}
        self._warned_of_pieces = False
        self._senders: dict[str, Sender] = {}  # by ticket id
        self._transfers: dict[str, Transfer] = {}  # by request id
        self._plan = _StepPlan()
        self._written: tuple[str, Event] | None = None  # what was written since the last layer was announced
        self._idle = False
        self._changed = threading.Condition()
        self._done: set[str] = set()
        self._failed: dict[str, str] = {}
        self._peers = Peers(
            identity,
            config,
            engine.limits.settle_s,
            make_sender=self._make_sender,
            check=self._check,
            destinations=self._destinations,
            revoked=self._finish,
            told=self._on_told,
            ended=self._on_ended,
            forget_sessions=engine.forget,
        )

    # Called by vLLM, on the model's thread.

    def start_step(self, step: ProducerStep) -> None:
        """Opens new transfers and plans the step. Blocks for nothing."""
        self.end_step()  # with speculative decoding, vLLM itself ends steps on the last pipeline stage only
        self._idle = step.idle
        for request_id, ticket in step.tickets.items():
            transfer = Transfer(
                request_id,
                ticket,
                ticket.digest(),
                tuple(np.asarray(blocks, dtype=np.int64) for blocks in ticket.remote_block_ids),
                ProducerTicket(time.monotonic() + self._config.grant_timeout_s),
            )
            self._transfers[request_id] = transfer
            self._senders[ticket.ticket_id] = self._peers.acquire(ticket)
            self._peers.open(transfer)
        for request_id, aborted in step.finished.items():
            self._release(request_id, aborted)
        self._plan = self._make_plan(step)
        self._written = None

    def layer_written(self, layer: str) -> None:
        """The layer to be announced next ("" if it is not named) has all its KV queued, its attention has not."""
        if self._plan.shipments:
            self._written = (layer, self._device.record_event())

    def layer_computed(self, layer: str) -> None:
        """The cache of `layer` holds this step's tokens, or will once what the model queued so far has run.

        Pushing waits for the writing of the cache alone where that was told, else for all that was queued. A draft's
        layers run over the step's tokens first, then once for every further token drafted, which is not sent: only
        the first time counts.
        """
        written, self._written = self._written, None
        if self._plan.shipments and layer in self._plan.unsaved:
            if written is None or written[0] not in ("", layer):
                written = layer, self._device.record_event()
            self._push_layer(layer, written[1])

    def end_step(self) -> None:
        """The forward pass is over, the draft's too: layers nobody announced are pushed, and prompts that end are
        sealed. Without effect where the step has ended already."""
        plan, self._plan = self._plan, _StepPlan()
        if plan.unsaved and plan.shipments:
            event = self._device.record_event()
            self._plan = plan
            for layer in list(plan.unsaved):
                self._push_layer(layer, event)
            self._plan = _StepPlan()
        if plan.last:
            computed = self._device.record_event()
            for transfer in plan.last:
                transfer.computed = computed
                self._finish(transfer)

    def preempted(self, request_ids: set[str]) -> None:
        """Their blocks are about to be reused: waits until no push reads them any more (R3)."""
        self.end_step()
        barriers = []
        for request_id in request_ids:
            transfer = self._transfers.get(request_id)
            if transfer is not None:
                barriers.append((transfer, Barrier(threading.Event())))
                self._senders[transfer.ticket.ticket_id].put(barriers[-1][1])
        deadline = time.monotonic() + self._config.write_timeout_s
        for transfer, barrier in barriers:
            if not barrier.passed.wait(max(0.0, deadline - time.monotonic())):
                self._lose(transfer, "the request was preempted while its KV could not be sent")
            elif transfer.settled_at > time.monotonic():
                # What the failed write left behind would read the blocks' next content, and deliver that.
                self._lose(transfer, "the request was preempted while a failed write of its KV may still be under way")

    def take_sent(self) -> set[str]:
        """Requests whose blocks vLLM may free: those it is done with and no push reads any more."""
        with self._changed:
            if self._idle and not self._done and self._transfers:
                self._changed.wait_for(lambda: bool(self._done), self._config.idle_wait_s)
            done, self._done = self._done, set()
        for request_id in done:
            ticket = self._transfers.pop(request_id).ticket
            self._senders.pop(ticket.ticket_id)
            self._peers.release(ticket)
        return done

    def take_report(self) -> WorkerReport | None:
        with self._changed:
            failed, self._failed = self._failed, {}
        return WorkerReport(failed=failed) if failed else None

    def close(self, timeout_s: float) -> None:
        self._peers.close(timeout_s)

    # Planning.

    def _make_plan(self, step: ProducerStep) -> _StepPlan:
        plan = _StepPlan()
        if not step.sends:
            return plan
        plan.unsaved = dict.fromkeys(self._caches.layers)
        items: dict[tuple[str, topology.Sharding, tuple[int, ...], str], list[Item]] = {}
        for send in step.sends:
            transfer = self._transfers[send.request_id]
            if send.last:
                plan.last.append(transfer)
            if send.start >= send.stop:
                continue
            ticket = transfer.ticket
            blocks = tuple(np.asarray(ids, dtype=np.int64) for ids in send.blocks)
            # Engines are told apart by what their tickets say, not by what they answered: every rank must arrive
            # at the same plan, whatever it has learnt so far (R5).
            key = (
                ticket.endpoint + ticket.remote_engine_id,
                ticket.sharding,
                tuple(ticket.remote_block_size),
                ticket.remote_draft,
            )
            items.setdefault(key, []).append(Item(transfer, send.start, send.stop, blocks))
        for (_, decode, d_block_sizes, draft), group in items.items():
            sender = self._senders[group[0].transfer.ticket.ticket_id]
            for index, geometry in enumerate(self._geometries):
                if not geometry.is_known_to(draft):
                    continue
                shipment = self._make_shipment(index, decode, d_block_sizes, group)
                if shipment is not None:
                    plan.shipments.setdefault(index, []).append((sender, shipment))
        return plan

    def _make_shipment(
        self, index: int, decode: topology.Sharding, d_block_sizes: tuple[int, ...], items: list[Item]
    ) -> Shipment | None:
        geometry = self._geometries[index]
        served = items
        try:
            route = self._route(index, decode, d_block_sizes)
            served = [item for item in items if route.serves(item.transfer.ticket.salt)]
            if not served:
                return None
            self._connect(route)
        except (ValueError, DeviceError) as error:  # the two sides cannot fit, or the side stream is broken
            for item in served:
                item.transfer.fail(str(error))
            return None
        chunk_units = 0
        if route.regroup is not Regroup.NONE:
            assert self._ring is not None
            per_unit = self._parts[index] * route.planes * route.staged_bytes
            chunk_units = self._ring.slot_bytes // per_unit
            assert chunk_units > 0
        try:
            shipment = Shipment.build(route, geometry, served, self._device, chunk_units)
        except DeviceError as error:
            self._missed(route, error)
            for item in served:
                item.transfer.fail(str(error))
            return None
        return shipment if len(shipment.src_units) > 0 else None

    def _connect(self, route: Route) -> None:
        """Connecting a group of ranks can take seconds: done at a topology's first ticket, beside the computation of
        the first layer rather than after it. All ranks come here in the same step (R5)."""
        if route.ranks and route.ranks not in self._connected:
            assert self._regrouper is not None
            self._connected.add(route.ranks)
            connect = functools.partial(self._regrouper.connect, route.ranks)
            try:
                self._device.submit(connect, self._device.record_event())
            except DeviceError as error:
                self._missed(route, error)
                raise

    def _route(self, index: int, decode: topology.Sharding, d_block_sizes: tuple[int, ...]) -> Route:
        key = (index, decode, d_block_sizes)
        if key not in self._routes:
            geometry = self._geometries[index]
            identity = self._identity
            route = make_route(geometry, identity.rank, identity.sharding, decode, d_block_sizes[geometry.group])
            self._routes[key] = route
            slow = why_slow(route, geometry, identity.sharding, decode, d_block_sizes[geometry.group])
            if slow is not None and not self._warned_of_pieces:
                self._warned_of_pieces = True
                logger.warning("%s", slow)
        return self._routes[key]

    # Pushing.

    def _push_layer(self, layer: str, computed: Event) -> None:
        self._plan.unsaved.pop(layer, None)
        for geometry, indices in self._by_geometry.get(layer, {}).items():
            for sender, shipment in self._plan.shipments.get(geometry, ()):
                for push in self._prepare(layer, shipment, indices, computed):
                    sender.put_layer(push, self._config.write_timeout_s)

    def _prepare(self, layer: str, shipment: Shipment, indices: tuple[int, ...], computed: Event) -> list[LayerPush]:
        described = self._caches.description.tensors
        route = shipment.route
        if route.regroup is Regroup.NONE:
            sources = tuple(Source(described[i], described[i].base) for i in indices)
            return [LayerPush(layer, shipment, chunk, sources, computed) for chunk in shipment.chunks]
        pushes = []
        tensors = [self._caches.tensors[i] for i in indices]
        for chunk in shipment.chunks:
            bytes_each = route.planes * chunk.count * route.staged_bytes
            sources = tuple(Source(described[i], n * bytes_each) for n, i in enumerate(indices))
            push = LayerPush(layer, shipment, chunk, sources, computed)
            try:
                push.ready = self._device.submit(self._regrouping(push, tensors), computed)
            except DeviceError as error:
                self._missed(route, error)
                push.fail(f"layer {layer} could not be regrouped: {error}")
                continue
            pushes.append(push)
        return pushes

    def _regrouping(self, push: LayerPush, tensors: list[torch.Tensor]) -> Callable[[], None]:
        regrouper = self._regrouper
        assert regrouper is not None

        def work() -> None:
            push.slot = regrouper.run(push.shipment.route, push.chunk, tensors)

        return work

    def _missed(self, route: Route, error: DeviceError) -> None:
        if route.ranks:
            assert self._regrouper is not None
            self._regrouper.give_up(route.ranks, str(error))

    # The end of a transfer.

    def _release(self, request_id: str, aborted: str | None) -> None:
        """vLLM is done with the request."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        if aborted is not None:
            transfer.fail(aborted)
        self._finish(transfer)
        with self._changed:
            transfer.released = True
            if transfer.ended:
                self._done.add(request_id)

    def _lose(self, transfer: Transfer, reason: str) -> None:
        transfer.fail(reason)
        self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        """Nothing more will be pushed. Called on any thread, any number of times."""
        with self._changed:
            if transfer.finishing:
                return
            transfer.finishing = True
        self._senders[transfer.ticket.ticket_id].put(Finish(transfer))

    def _on_finished(self, transfer: Transfer) -> None:
        """On the sender's thread: no write can follow."""
        transfer.finish()
        self._peers.report(transfer)

    def _on_told(self, transfer: Transfer) -> None:
        """On the control thread: decode knows how it ended, or cannot be reached."""
        if transfer.failure is not None:
            logger.warning("request %s: KV was not delivered: %s", transfer.request_id, transfer.failure)
            with self._changed:
                self._failed[transfer.request_id] = transfer.failure

    def _on_ended(self, transfer: Transfer) -> None:
        """On the control thread, after `_on_told`: nothing reads the request's blocks any more."""
        with self._changed:
            transfer.ended = True
            if transfer.released:
                self._done.add(transfer.request_id)
            self._changed.notify_all()

    # What Peers asks for.

    def _make_sender(self, name: str) -> Sender:
        return Sender(
            name,
            self._engine,
            self._ring,
            self._on_finished,
            queue_size=self._config.push_queue_size,
            ready_timeout_s=self._config.collective_timeout_s + self._config.write_timeout_s,
        )

    def _check(self, description: EngineDescription) -> str | None:
        identity = self._identity
        declared = self._config.decode
        if declared is not None and declared.tp_size not in (None, description.tp):
            return f"config says decode's tp_size is {declared.tp_size}, decode's is {description.tp}"
        if declared is not None and declared.pp_size not in (None, description.pp):
            return f"config says decode's pp_size is {declared.pp_size}, decode's is {description.pp}"
        if description.draft not in ("", identity.draft):
            logger.warning(
                "decode engine %s drafts with %s, prefill with %s: the draft's KV of prompts is not sent, and fewer of "
                "its tokens will be accepted",
                description.engine_id,
                description.draft,
                identity.draft or "no layers of its own",
            )
        whole = identity.pp == 1
        ours = self._caches.description
        return mismatch(ours, identity.model, identity.rank, identity.sharding, whole, description)

    def _destinations(self, layout: DecodeLayout, transfer: Transfer) -> dict[RankKey, Destination]:
        """The decode ranks this rank writes to for the ticket, and which of their tensors it covers."""
        ticket = transfer.ticket
        covers: dict[RankKey, list[int]] = {}
        ranks = {}
        for tensor in self._caches.description.tensors:
            if not self._geometries[tensor.geometry].is_known_to(ticket.remote_draft):
                continue
            route = self._route(tensor.geometry, ticket.sharding, tuple(ticket.remote_block_size))
            if not route.serves(ticket.salt):
                continue
            for target in route.targets:
                remote = layout.locate(tensor, target.tp_rank)
                indices = covers.setdefault(remote.key, [])
                if remote.index not in indices:
                    indices.append(remote.index)
                ranks[remote.key] = remote.rank
        return {key: Destination(ranks[key], tuple(indices)) for key, indices in covers.items()}

    # Set-up.

    def _make_regrouper(self, step_tokens: int) -> tuple[StagingRing | None, Regrouper | None]:
        """A ring and all-to-all groups, where this engine's layout may ever need regrouping.

        The same on all ranks: it depends on the model, the layout and the parallel sizes alone.
        """
        size, slots = slot_bytes(self._caches.description, step_tokens), self._config.staging_slots
        if size == 0:
            return None, None
        buffer = self._device.allocate(size * slots)
        self._engine.register([(buffer.data_ptr(), buffer.numel())])
        movable = regroupable(self._geometries)
        sharding = self._identity.sharding
        wanted = sorted({ranks for g in movable for ranks in topology.regroup_groups(sharding, g.total_heads)})
        groups = self._device.new_groups(self._world_groups(wanted), self._config.collective_timeout_s)
        mine = {ranks: groups[self._in_world(ranks)] for ranks in wanted if self._identity.rank in ranks}
        ring = StagingRing(buffer, size, slots)
        patience = self._config.write_timeout_s + self._config.grant_timeout_s
        return ring, Regrouper(self._device, ring, mine, patience)

    def _in_world(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._identity.stage_ranks[rank] for rank in ranks)

    def _world_groups(self, wanted: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """`wanted` within every pipeline stage of the world: creating a group takes all ranks, in one order.

        vLLM numbers the world with tensor-parallel ranks running fastest, then prefill-context-parallel ones.
        """
        stage = len(self._identity.stage_ranks)
        world = torch.distributed.get_world_size() if wanted else 0
        return [tuple(first + rank for rank in ranks) for first in range(0, world, stage) for ranks in wanted]

    def _group_by_geometry(self, indices: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        groups: dict[int, list[int]] = {}
        for index in indices:
            groups.setdefault(self._caches.description.tensors[index].geometry, []).append(index)
        return {geometry: tuple(members) for geometry, members in groups.items()}
