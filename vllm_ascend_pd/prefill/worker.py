# SPDX-License-Identifier: Apache-2.0
"""The prefill side of a worker: plans each step, and pushes each layer as soon as it is computed."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import torch

from vllm_ascend_pd.core import stats
from vllm_ascend_pd.core.caches import Alike, RegisteredCaches
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.plan import Regroup
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket
from vllm_ascend_pd.core.rank_info import RankInfo
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.core.step import PrefillStep, WorkerReport
from vllm_ascend_pd.core.weights import LoadedWeights, WeightUpdates
from vllm_ascend_pd.device.base import Device, DeviceError, Event
from vllm_ascend_pd.observe.prefill import prefill_trace
from vllm_ascend_pd.prefill.fit import misfit
from vllm_ascend_pd.prefill.grant_wait import GrantWaitLimit
from vllm_ascend_pd.prefill.peers import Peers
from vllm_ascend_pd.prefill.planner import Planner, StepPlan
from vllm_ascend_pd.prefill.regroup import make_regrouper
from vllm_ascend_pd.prefill.sender import Barrier, Finish, LayerPush, Sender
from vllm_ascend_pd.prefill.step_transfer import StepTransfer
from vllm_ascend_pd.prefill.transfer import Transfer, Withdrawals
from vllm_ascend_pd.transport.engine import TransferEngine

logger = logging.getLogger(__name__)


class PrefillWorker:
    """`step_tokens`: most tokens one step computes, which sizes the staging ring; `loaded`: the model's weights, None
    if they are not known."""

    def __init__(
        self,
        identity: RankInfo,
        config: ConnectorConfig,
        device: Device,
        engine: TransferEngine,
        caches: RegisteredCaches,
        step_tokens: int,
        loaded: LoadedWeights | None = None,
    ) -> None:
        self._identity = identity
        self._loaded = loaded or LoadedWeights()
        self._updates = WeightUpdates(f"{identity.pp_rank}/{identity.rank}", self._loaded)
        self._config = config
        self._device = device
        self._engine = engine
        self._caches = caches
        self._running_time = RunningTime()
        self._ring, self._regrouper = make_regrouper(
            identity, config, device, engine, caches, step_tokens, self._running_time
        )
        self._planner = Planner(identity, caches, device, self._regrouper)
        self._senders: dict[str, Sender] = {}  # by ticket id
        self._in_use: Counter[Sender] = Counter()  # how many of these tickets each sender has
        self._transfers: dict[str, Transfer] = {}  # by request id
        self._ungranted: list[Transfer] = []
        self._withdrawals = Withdrawals()
        self._plan = StepPlan()
        self._forward_ended = True  # of that step
        self._written: tuple[str, Event] | None = None  # what was written since the last layer was announced
        self._wait_s = 0.0
        self._changed = threading.Condition()
        self._stats = stats.Stats(f"{identity.pp_rank}/{identity.rank}")
        self._stats.state(stats.TRANSPORT_INFO, msgspec.structs.astuple(engine.transport))
        self._trace = prefill_trace(config, identity)
        self._done: set[str] = set()
        self._failed: dict[str, str] = {}
        self._peers = Peers(
            identity,
            config,
            engine.limits.settle_s,
            self._running_time,
            make_sender=self._make_sender,
            check=partial(misfit, identity, config, caches.description, engine.transport),
            destinations=self._planner.destinations,
            revoked=self._finish,
            told=self._on_told,
            ended=self._on_ended,
            forget_sessions=engine.forget,
            trace=self._trace,
        )

    # Called by vLLM, on the model's thread.

    def start_step(self, step: PrefillStep) -> None:
        """Opens new transfers and plans the step. Blocks for nothing."""
        self._end_open_step()
        self._wait_s = step.wait_s
        opened, now = [], time.monotonic()
        for request_id, ticket in step.tickets.items():
            grant_deadline = now + self._config.grant_timeout_s
            sender = self._peers.acquire(ticket)
            transfer = Transfer(
                request_id,
                ticket,
                PrefillTicket(grant_deadline, patience_ends=now + self._config.transfer_timeout_s),
                self._withdrawals,
                sender.patience,
                grant_deadline,
                step.cached_tokens.get(request_id, 0),
                self._loaded.current,
            )
            self._transfers[request_id] = transfer
            self._senders[ticket.ticket_id] = sender
            self._in_use[sender] += 1
            opened.append(transfer)
        if opened:
            self._peers.open(opened)
            self._ungranted = [*self._still_ungranted(), *opened]
        if self._updates.are_unknown_to(step.weight_updates):
            reason = "prefill's weights were updated, and a part of the prompt was cached before"
            for transfer in opened:
                if transfer.cached_tokens:
                    self._lose(transfer, reason, PushFailure.WEIGHTS)
        for request_id, aborted in step.finished.items():
            self._release(request_id, aborted)
        for send in step.sends:
            self._transfers[send.request_id].planned = True
        self._plan = self._planner.plan(step.sends, self._transfers, self._senders)
        self._forward_ended = False
        self._written = None
        self._trace.step_began(self._plan.number, ((send, self._transfers[send.request_id]) for send in step.sends))

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
            if not self._plan.unsaved:  # decode need not wait for the rest of the step
                self._finish(*self._plan.last)

    def end_step(self) -> None:
        """The forward pass is over, the draft's too: layers nobody announced are pushed, and nothing follows of prompts
        that end. Without effect where the step has ended already."""
        plan, self._plan = self._plan, StepPlan()
        if plan.unsaved and plan.shipments:
            event = self._device.record_event()
            self._plan = plan
            for layer in list(plan.unsaved):
                self._push_layer(layer, event)
            self._plan = StepPlan()
        computed = self._device.record_event() if plan.last else None
        self._trace.step_ended(computed)
        if computed is not None:
            for transfer in plan.last:
                transfer.computed = computed
            self._finish(*plan.last)

    def forward_ended(self, error: BaseException | None = None) -> None:
        """The forward pass has, well or in `error`; the draft may still run. What it did not compute must not count as
        delivered (R1), though this rank still takes part in the step's collectives when the step ends."""
        self._forward_ended = True
        if error is not None:
            shipments = [shipment for of in self._plan.shipments.values() for _, shipment in of]
            for transfer in {*self._plan.last, *(t for shipment in shipments for t in shipment.transfers)}:
                transfer.fail(f"prefill's forward pass failed: {error!r}", PushFailure.INTERNAL)

    def _end_open_step(self) -> None:
        """With speculative decoding, vLLM itself ends steps on the last pipeline stage only. It says of all that their
        forward pass has ended, unless that failed."""
        if not self._forward_ended:
            self.forward_ended(RuntimeError("it did not end"))
        self.end_step()

    def preempted(self, request_ids: set[str]) -> None:
        """Their blocks are about to be reused: waits until no push reads them any more (R3)."""
        self._end_open_step()
        barriers = []
        for request_id in request_ids:
            transfer = self._transfers.get(request_id)
            if transfer is not None:
                barriers.append((transfer, Barrier(threading.Event())))
                self._senders[transfer.ticket.ticket_id].put(barriers[-1][1])
        deadline = time.monotonic() + self._config.write_timeout_s
        for transfer, barrier in barriers:
            if not barrier.passed.wait(max(0.0, deadline - time.monotonic())):
                self._lose(transfer, "the request was preempted while its KV could not be sent", PushFailure.PREEMPTED)
            elif transfer.settled_at > self._running_time():
                # What the failed write left behind would read the blocks' next content, and deliver that.
                reason = "the request was preempted while a failed write of its KV may still be under way"
                self._lose(transfer, reason, PushFailure.PREEMPTED)

    def take_sent(self) -> set[str]:
        """Requests whose blocks vLLM may free: those it is done with and no push reads any more."""
        with self._changed:
            if self._wait_s and self._transfers:
                self._changed.wait_for(lambda: bool(self._done), self._wait_s)
            done, self._done = self._done, set()
        for sender in self._in_use:
            if sender.broken is not None:  # its transfers would wait for ever
                raise RuntimeError("a sender has ended by an error of its own") from sender.broken
        for request_id in done:
            ticket = self._transfers.pop(request_id).ticket
            sender = self._senders.pop(ticket.ticket_id)
            self._in_use[sender] -= 1
            if self._in_use[sender] == 0:
                del self._in_use[sender]
            self._peers.release(ticket)
        return done

    def take_report(self) -> WorkerReport | None:
        with self._changed:
            failed, self._failed = self._failed, {}
        return WorkerReport(failed=failed, weight_updates=self._updates.take_news()) or None

    def take_stats(self) -> stats.Data:
        return self._stats.take(self._gauges)

    def _gauges(self) -> dict[stats.Gauge, int]:
        self._ungranted = self._still_ungranted()
        queued = sum(sender.queued for sender in self._in_use)
        failure = self._device.failure or (self._regrouper and self._regrouper.failure)
        return {
            stats.PUSH_QUEUE_DEPTH: queued,
            stats.GRANTS_WAITING: len(self._ungranted),
            stats.RESTART_NEEDED: int(failure is not None),
        }

    def _still_ungranted(self) -> list[Transfer]:
        """Of those that waited when last asked: who has all grants keeps them."""
        return [transfer for transfer in self._ungranted if transfer.state.waits_for_grant]

    def close(self, timeout_s: float) -> None:
        for transfer in list(self._transfers.values()):  # nobody waits for its grants any more
            transfer.fail("prefill shuts down", PushFailure.ABORTED)
        self._peers.close(timeout_s)
        if self._regrouper is not None:
            self._regrouper.close()
        self._trace.close(timeout_s)

    # Pushing.

    def _push_layer(self, layer: str, computed: Event) -> None:
        self._plan.unsaved.pop(layer, None)
        self._trace.layer_computed(layer, computed)
        for geometry, alike in self._caches.layers_by_geometry.get(layer, {}).items():
            for sender, shipment in self._plan.shipments.get(geometry, ()):
                for push in self._prepare(layer, shipment, alike, computed):
                    sender.put_layer(push, self._config.write_timeout_s)

    def _prepare(self, layer: str, shipment: StepTransfer, alike: Alike, computed: Event) -> Iterator[LayerPush]:
        """One after the other: the next may need the staging slot of one that has to be sent first."""
        route = shipment.route
        if route.regroup is Regroup.NONE:
            for chunk in shipment.chunks:
                yield LayerPush(layer, shipment, chunk, alike.described, computed)
            return
        for chunk in shipment.chunks:
            staged_bytes = route.planes * chunk.count * route.staged_bytes
            push = LayerPush(layer, shipment, chunk, alike.described, computed, computed, staged_bytes=staged_bytes)
            try:
                push.ready = self._device.submit(self._regrouping(push, alike.tensors), computed)
            except DeviceError as error:
                self._planner.missed(route, error)
                push.fail(f"layer {layer} could not be regrouped: {error}", PushFailure.DEVICE)
                continue
            self._trace.regroups(push)
            yield push

    def _regrouping(self, push: LayerPush, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
        regrouper = self._regrouper
        assert regrouper is not None

        def work() -> None:
            slot = regrouper.run(push.shipment, push.chunk, tensors)
            if not push.filled(slot):  # the sender has waited for as long as it may
                regrouper.release(slot)

        return work

    def _others_wait(self, sender: Sender) -> bool:
        """Has the sender transfers that have their grants, and KV to be written? On its thread."""
        return any(
            other.planned and other.state.may_be_written and self._senders.get(other.ticket.ticket_id) is sender
            for other in list(self._transfers.values())
        )

    # The end of a transfer.

    def _release(self, request_id: str, aborted: str | None) -> None:
        """vLLM is done with the request."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        if aborted is not None:
            transfer.fail(aborted, PushFailure.ABORTED)
        self._finish(transfer)
        with self._changed:
            transfer.released = True
            if transfer.ended:
                self._done.add(request_id)

    def _lose(self, transfer: Transfer, reason: str, cause: PushFailure) -> None:
        transfer.fail(reason, cause)
        self._finish(transfer)

    def _finish(self, *transfers: Transfer) -> None:
        """Nothing more will be pushed. Called on any thread, any number of times."""
        of: dict[Sender, list[Transfer]] = {}
        with self._changed:
            for transfer in transfers:
                if not transfer.finishing:
                    transfer.finishing = True
                    of.setdefault(self._senders[transfer.ticket.ticket_id], []).append(transfer)
        for sender, finishing in of.items():
            sender.put(Finish(finishing))

    def _on_finished(self, transfers: Sequence[Transfer]) -> None:
        """On the sender's thread: no write can follow."""
        late = [transfer for transfer in transfers if transfer.state.waits_for_grant]  # the others do not wait for them
        for together in ([transfer for transfer in transfers if transfer not in late], *([each] for each in late)):
            for transfer in together:
                self._check_weights(transfer)
                transfer.finish()
                self._trace.finished(transfer)
                if (cause := transfer.state.cause) is not None:
                    self._stats.add(stats.PUSH_FAILURES, reason=cause.value)
                elif (num_bytes := transfer.num_bytes) > 0:
                    self._stats.observe(stats.OVERLAP_RATIO, transfer.bytes_at_end / num_bytes)
            self._peers.report(together)

    def _check_weights(self, transfer: Transfer) -> None:
        """All of the prompt must be computed with the weights that decode was told of (R8). They change between steps,
        and its last layer has been computed by now."""
        before, now = transfer.weights, self._loaded.current
        if before.version != now.version:
            names = f"from {before.fingerprint or 'unknown ones'} to {now.fingerprint or 'unknown ones'}"
            reason = f"prefill's weights were updated before all KV was sent, {names}"
            transfer.fail(reason, PushFailure.WEIGHTS)

    def _on_told(self, transfer: Transfer) -> None:
        """On the control thread: decode knows how it ended, or cannot be reached."""
        self._trace.told(transfer)
        if transfer.failure is not None:
            logger.warning(
                "request %s: KV was not delivered to decode engine %s at %s:%d: %s: its answer says so",
                transfer.request_id,
                transfer.ticket.remote_engine_id,
                transfer.ticket.remote_host,
                transfer.ticket.remote_port,
                transfer.failure,
            )
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
        sender = Sender(
            name,
            self._engine,
            self._ring,
            self._on_finished,
            self._running_time,
            self._stats,
            self._trace,
            queue_size=self._config.push_queue_size,
            ready_timeout_s=self._config.collective_timeout_s + self._config.write_timeout_s,
        )
        sender.patience = GrantWaitLimit(self._config.control_timeout_s, partial(self._others_wait, sender))
        return sender
