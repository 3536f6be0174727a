# SPDX-License-Identifier: Apache-2.0
"""The prefill side of a worker: plans each step, and pushes each layer as soon as it is computed."""

import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType

from vllm_ascend_pd.core.caches import RegisteredCaches
from vllm_ascend_pd.core.checksum import Form
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import LayerComputed, Observer, PrefillStatus, RegroupSubmitted, StepBegun, StepEnded
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.role import ConnectorRole, TransferResults
from vllm_ascend_pd.core.step import PrefillStep, WorkerReport, rank_address
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.core.weights import LoadedWeights, WeightUpdates
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.event import Event
from vllm_ascend_pd.prefill.buffer_turns import BufferTurns
from vllm_ascend_pd.prefill.checksums import submit_layer
from vllm_ascend_pd.prefill.control import ControlPlane
from vllm_ascend_pd.prefill.decode_layout import RankMappings
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import make_regrouper
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.step_plan import Planner, StepPlan
from vllm_ascend_pd.prefill.step_send import LayerPush
from vllm_ascend_pd.prefill.transfer import Outcome, Transfer
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.peers import Peers


class PrefillWorker(ConnectorRole):
    """One rank of a prefill engine. vLLM's model thread calls all methods but `await_buffer`.

    It calls them in this order: `preempted` if requests were preempted, `start_step`, then `mark_cached` and
    `push_layer` for each layer, `end_forward`, `end_step` and `take_results`.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        config: ConnectorConfig,
        device: Device,
        engine: TransferEngine,
        caches: RegisteredCaches,
        step_tokens: int,
        loaded: LoadedWeights | None = None,
        observer: Observer | None = None,
        caches_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
        in_order: Sequence[Sequence[str]] = (),
        peers: Peers | None = None,
        checksum_form: Form = Form.SUM_64,
    ) -> None:
        """Starts the control thread.

        step_tokens: the most tokens that one step computes. It decides the size of the staging ring.
        loaded: the model's weights; None if they are not known.
        observer: is told what the rank does; None if nothing listens.
        caches_of: the caches of layers that have several, by the name that `push_layer` gets.
        in_order: the caches of each layer, in the order of layers.
        peers: the decode engines that it serves; None: those of this host, without a secret.
        checksum_form: how it takes checksums, if decode reads that.
        """
        self._caches_of = caches_of
        self._in_order = in_order
        self._rank = rank = PrefillRank(
            rank_info,
            config,
            device,
            engine,
            caches,
            loaded or LoadedWeights(),
            observer or Observer(),
            peers=peers or Peers(),
            checksum_form=checksum_form,
        )
        self._updates = WeightUpdates(f"{rank_info.pp_rank}/{rank_info.rank}", rank.loaded)
        self._device = device
        self._caches = caches
        self._observer = rank.observer
        self._regrouper = make_regrouper(rank, step_tokens)
        mappings = RankMappings(rank_info, caches.description)
        self._planner = Planner(rank, mappings, self._regrouper)
        ring = None if self._regrouper is None else self._regrouper.ring
        self._control = ControlPlane(rank, ring, mappings)
        # None if each layer has a buffer of its own.
        self._turns = BufferTurns(rank) if caches.sharing_buffers else None
        # The open transfers, by request id.
        self._transfers: dict[str, Transfer] = {}
        # Whether the scheduler has woken the rank since its last wait: the next one does not wait either.
        self._woken = False
        # Request ids whose blocks may be freed.
        self._done: set[str] = set()
        # By request id: why its KV was not delivered, if the scheduler has not been told yet.
        self._failed: dict[str, str] = {}
        # This step, and what is left of it.
        self._step = PrefillStep()
        self._plan = StepPlan()
        # Whether the forward pass of that step has ended.
        self._forward_ended = True
        # The layer that `mark_cached` named last, and the device event after it. None after `push_layer`.
        self._cached: tuple[str, Event] | None = None

    @owned
    def start_step(self, step: PrefillStep) -> None:
        """Opens new transfers and plans the step.

        Waits for nothing, with three exceptions. If vLLM has not ended the step before, or this one computes nothing,
        it waits as `end_step` may. For what is pushed at once, it waits for room as `push_layer` does. If vLLM has
        taken back KV that is still being written, it waits for `write_timeout_s` at most.
        """
        self._end_open_step()
        self._step = step
        if step.wakeup_address:
            info = self._rank.info
            self._control.wake_at(rank_address(step.wakeup_address, info.pp_rank, info.rank))
        opened = self._open(step.tickets, step.cached_tokens)
        if self._updates.are_unknown_to(step.weight_updates):
            reason = "prefill's weights were updated, or it slept, and a part of the prompt was computed before"
            older = [transfer for transfer in opened if transfer.cached_tokens or transfer.request_id in step.late]
            self._lose(older, reason, PushFailure.WEIGHTS)
        if self._turns is not None:
            reason = "prefill keeps the KV of a few layers at a time, and has computed a part of the prompt before"
            self._lose([t for t in opened if t.request_id in step.late], reason, PushFailure.UNFIT)
        for request_id, incomplete in step.finished.items():
            self._release(request_id, incomplete)
        self._done.update(step.unsent)
        if step.report_again is not None:
            self._done.update(step.report_again - self._transfers.keys())  # the others will be reported
            self._updates.report_again()
        self._plan = self._planner.plan(step.sends, self._transfers)
        self._await_replaced_writes()
        self._forward_ended = False
        self._cached = None
        parts = [(self._transfers[send.request_id].ticket, send) for send in step.sends if not send.was_computed]
        self._observer.on(StepBegun(self._plan.number, parts))
        if self._plan.sent_at_once:
            self._push_at_once()
        if not step.computes:  # vLLM does not say that such a step ends
            self._forward_ended = True
            self.end_step()

    def _push_at_once(self) -> None:
        """Pushes what earlier steps have computed. It need not wait for the layers of this one, which may take long."""
        computed = self._device.record_event()
        for transfer in self._plan.sent_at_once:  # none of its bytes is early
            transfer.prompt_end = computed
        for layer, of_layer in self._caches.layers_by_geometry.items():
            for geometry, tensors in of_layer.items():
                for step_send in self._plan.at_once.get(geometry, ()):
                    push = LayerPush(layer, step_send, tensors.described, computed, computed)
                    step_send.transfers[0].sender.put_layer(push)
        self._finish(self._plan.sent_at_once)

    def _await_replaced_writes(self) -> None:
        """Waits for earlier writes of KV that vLLM took back, if ranks exchange what replaces it.

        The step's units are divided anew. So another rank may write what this one has written before, and may begin
        when the ranks have exchanged it: then all of them have waited (R1).
        """
        exchanged = {t for each in self._plan.layer_sends if each.mapping.ranks for t in each.transfers if t.again}
        barriers = [(transfer, transfer.sender.barrier()) for transfer in exchanged]
        deadline = time.monotonic() + self._rank.config.write_timeout_s
        for transfer, passed in barriers:
            if not passed.wait(max(0.0, deadline - time.monotonic())):
                reason = "KV that vLLM took back was still being written when it was computed again"
                transfer.state.fail(reason, PushFailure.WRITE)

    @owned
    def mark_cached(self, layer: str) -> None:
        """All KV of a layer is queued to be written to the cache, and its attention is not queued yet.

        `layer`: the layer that `push_layer` names next; "" if the caller does not know its name.
        """
        if self._plan.sends:
            self._cached = (layer, self._device.record_event())
            if self._turns is not None:
                self._turns.mark_written(layer, self._plan.layer_sends)

    @owned
    def push_layer(self, layer: str) -> None:
        """The cache of `layer` holds this step's tokens as soon as the device has run what is queued now.

        Does not wait for the device or the network, unless sending is so far behind that all staging slots are taken or
        a sender's queue is full. Then it waits for `control_timeout_s`, `write_timeout_s` and, after a failed write, as
        long as its slot rests. If that is not enough, the layer's requests fail. `backpressure_seconds` counts this.

        If `mark_cached` was called for this layer, the push waits only for what was queued by then. A draft's layers
        run over the step's tokens first, and then once for each further drafted token, whose KV is not sent. So only
        the first call for a layer counts.

        `layer`: "" for a linear-attention layer, which vllm-ascend does not name (`ops/gdn.py`). Layers that no call
        has named are pushed when the step ends.
        """
        for name in self._caches_of.get(layer, (layer,)):
            written, self._cached = self._cached, None
            if self._plan.sends and name in self._plan.unpushed:
                if written is None or written[0] not in ("", name):
                    written = name, self._device.record_event()
                self._put_layer(self._plan, name, written[1])
                if not self._plan.unpushed:  # decode need not wait for the rest of the step
                    self._finish(self._plan.confirmed)
                    self._plan.confirmed.clear()
            elif self._turns is not None:
                self._turns.add_reads(name, ())

    def await_buffer(self, layer: str | int) -> None:
        """Waits until the KV of other layers, in the same buffer as that of `layer`, is not read any more (R3).

        Call it before the layer is written, on any thread. Does not wait if each layer has a buffer of its own.
        It waits for `control_timeout_s`, `write_timeout_s` and, after a failed write, as long as its bytes may be under
        way. If that is not enough, the requests fail. `backpressure_seconds` counts this.

        `layer`: its name, or its number on this rank.
        """
        if self._turns is not None:
            self._turns.wait(self._in_order[layer] if isinstance(layer, int) else self._caches_of.get(layer, (layer,)))

    @owned
    def end_forward(self, error: BaseException | None = None) -> None:
        """The forward pass has ended, and `error` is why it failed. The draft may still run.

        After an error, the step's requests fail, because their KV may be missing (R1). This rank still takes part in
        the step's collectives when the step ends (R5).
        """
        self._forward_ended = True
        if error is not None:
            pushed = {transfer for step_send in self._plan.layer_sends for transfer in step_send.transfers}
            for transfer in {*self._plan.last, *pushed}:
                transfer.state.fail(f"prefill's forward pass failed: {error!r}", PushFailure.INTERNAL)

    @owned
    def end_step(self) -> None:
        """The forward pass and the draft have ended. Pushes the layers that no call has announced, and finishes the
        prompts that end in this step. A second call does nothing."""
        if not self._plan.number:
            return
        plan, self._plan = self._plan, StepPlan()
        if self._turns is not None:
            self._turns.add_reads("", ())  # an exception may have come between a layer's hooks
        if plan.unpushed and plan.sends:
            event = self._device.record_event()
            for layer in plan.unpushed:
                if self._turns is not None and layer in self._turns:
                    for step_send in plan.layer_sends:
                        step_send.fail(f"another layer may have overwritten the KV of {layer}", PushFailure.INTERNAL)
            for layer in list(plan.unpushed):
                self._put_layer(plan, layer, event, is_announced=False)
        computed = self._device.record_event() if plan.last else None
        self._observer.on(StepEnded(computed))
        if computed is not None:
            for transfer in plan.last:
                transfer.prompt_end = computed
            self._finish(plan.confirmed)

    @owned
    def preempted(self, step: PrefillStep) -> None:
        """Waits until no push reads the blocks of the step's preempted requests, which are about to be reused (R3)."""
        self._end_open_step()
        preempted = [transfer for transfer in map(self._transfers.get, step.preempted) if transfer is not None]
        barriers = [(transfer, transfer.sender.barrier()) for transfer in preempted]
        deadline = time.monotonic() + self._rank.config.write_timeout_s
        for transfer, passed in barriers:
            reason = None
            if not passed.wait(max(0.0, deadline - time.monotonic())):
                reason = "the request was preempted while its KV could not be sent"
            elif transfer.state.settled_at > self._rank.running_time():
                # What the failed write left behind would read the blocks' next content, and deliver that.
                reason = "the request was preempted while a failed write of its KV may still be under way"
            if reason is not None:
                self._lose([transfer], reason, PushFailure.PREEMPTED)

    @owned
    def take_results(self) -> TransferResults:
        """Returns the requests whose blocks vLLM may free: it is done with them and no push reads them any more.

        Waits for one as long as the step says, if there are transfers or blocks that wait for tickets, or until the
        scheduler wakes the rank. Raises RuntimeError if a sender has ended by a bug.
        """
        self._take_outcomes()
        wait_s, deadline = self._step.wait_s, time.monotonic() + self._step.wait_s
        expects = bool(self._transfers) or self._step.awaits_tickets
        while wait_s and expects and not self._done and not self._woken:
            try:
                self._take(self._control.outcomes.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        self._woken = False
        done, self._done = self._done, set()
        for sender in self._senders():
            sender.check()
        for request_id in done:
            transfer = self._transfers.pop(request_id, None)
            if transfer is not None:
                self._control.release(transfer.ticket)
        return TransferResults(sent=done)

    @owned
    def take_report(self) -> WorkerReport | None:
        self._take_outcomes()
        failed, self._failed = self._failed, {}
        return WorkerReport(failed=failed, weight_updates=self._updates.take_news()) or None

    @owned
    def status(self) -> PrefillStatus:
        """How this rank is now."""
        ungranted = sum(transfer.state.waits_for_grant for transfer in self._transfers.values())
        queued = sum(sender.queued for sender in self._senders())
        return PrefillStatus(queued, ungranted, restart_needed=self.failure is not None)

    @property
    def failure(self) -> str | None:
        regrouping = None if self._regrouper is None else self._regrouper.failure
        return self._device.failure or regrouping or self._rank.engine.failure

    @property
    def exchanged_steps(self) -> int:
        return 0 if self._regrouper is None else self._planner.steps

    @owned
    def sleep(self) -> None:
        """Ends all transfers and unregisters memory, so that it may be freed. Call `wake` before the next step.

        Raises RuntimeError if a transfer does not end in time: memory may still be read then (R3).
        """
        self._end_open_step()
        self._lose(list(self._transfers.values()), "prefill sleeps (/sleep)", PushFailure.ABORTED)
        config = self._rank.config
        longest_s = config.grant_timeout_s + config.write_timeout_s + 4 * config.control_timeout_s
        deadline = time.monotonic() + longest_s + self._rank.engine.limits.rest_s
        while not all(transfer.is_over for transfer in self._transfers.values()):
            try:
                self._take(self._control.outcomes.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise RuntimeError("this engine cannot sleep: KV is still being sent") from None
        self._device.idle(config.collective_timeout_s)
        self._rank.engine.suspend()
        self._rank.loaded.caches_lost()  # prompts that wait for their tickets are gone (R1)

    @owned
    def wake(self) -> None:
        """Registers the memory again, which is at the same addresses."""
        self._rank.engine.resume()

    def close(self, timeout_s: float) -> None:
        for transfer in list(self._transfers.values()):  # so that no sender waits for its grants any more
            transfer.state.fail("prefill shuts down", PushFailure.ABORTED)
        with ExitStack() as closing:  # all of them, even if one raises
            closing.callback(self._observer.close, timeout_s)
            if self._regrouper is not None:
                closing.callback(self._regrouper.close)
            closing.callback(self._control.close, timeout_s)

    def _end_open_step(self) -> None:
        """Ends the last step if vLLM has not.

        With speculative decoding, vLLM calls `end_step` on the last pipeline stage only. It calls `end_forward` on
        all stages, unless the forward pass failed.
        """
        if not self._forward_ended:
            self.end_forward(RuntimeError("vLLM did not report its end"))
        self.end_step()

    def _put_layer(self, plan: StepPlan, layer: str, computed: Event, *, is_announced: bool = True) -> None:
        """Puts a layer into the queues of the senders that the step's plan names.

        `is_announced`: whether the layer was computed just now, and not at an unknown time of the step.
        """
        plan.unpushed.pop(layer, None)
        self._observer.on(LayerComputed(layer, computed))
        pushes, of_layer, ready = [], self._caches.layers_by_geometry.get(layer, {}), computed
        if plan.checksums:
            steps = [(each, tensors) for index, tensors in of_layer.items() for each in plan.checksums.get(index, ())]
            if steps:
                ready = submit_layer(self._device, steps, self._caches.quantize, computed)
        for geometry, tensors in of_layer.items():
            for step_send in plan.sends.get(geometry, ()):
                # One after the other: the next one may wait for the staging slot of this one.
                push = LayerPush(layer, step_send, tensors.described, computed, ready)
                if step_send.mapping.is_staged:
                    assert self._regrouper is not None
                    if not self._regrouper.submit(push, tensors.tensors):
                        continue
                if self._turns is not None:
                    push.over = threading.Event()
                step_send.transfers[0].sender.put_layer(push)
                pushes.append(push)
                if step_send.mapping.is_staged:
                    self._observer.on(RegroupSubmitted(layer, step_send.ticket_ids, computed, push.ready))
        if self._turns is not None and is_announced:
            self._turns.add_reads(layer, pushes)

    # The open transfers.

    def _senders(self) -> set[Sender]:
        """Returns what writes to the decode engines with open transfers."""
        return {transfer.sender for transfer in self._transfers.values()}

    def _open(self, tickets: dict[str, Ticket], cached_tokens: dict[str, int]) -> list[Transfer]:
        """Opens a transfer for each ticket, by request id, and begins to ask for grants."""
        opened, now = [], time.monotonic()
        for request_id, ticket in tickets.items():
            transfer = self._transfers[request_id] = Transfer(
                request_id,
                ticket,
                self._control.acquire(ticket),
                PrefillTicket(now + self._rank.config.grant_timeout_s),
                cached_tokens.get(request_id, 0),
                self._rank.loaded.current,
            )
            opened.append(transfer)
        if opened:
            self._control.open(opened)
        return opened

    def _finish(self, transfers: Iterable[Transfer]) -> None:
        """Ends the pushing for these transfers. May be called any number of times."""
        of: dict[Sender, list[Transfer]] = {}
        for transfer in transfers:
            of.setdefault(transfer.sender, []).append(transfer)
        for sender, finishing in of.items():
            sender.finish(finishing)

    def _lose(self, transfers: Sequence[Transfer], reason: str, cause: PushFailure) -> None:
        """Fails these transfers and ends the pushing for them."""
        for transfer in transfers:
            transfer.state.fail(reason, cause)
        self._finish(transfers)

    def _release(self, request_id: str, incomplete: str | None) -> None:
        """Records that vLLM is done with the request. `incomplete`: why its KV is not complete; None if it is."""
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return
        if incomplete is not None:
            transfer.state.fail(incomplete, PushFailure.ABORTED)
        self._finish([transfer])
        transfer.released = True
        if transfer.is_over:
            self._done.add(request_id)

    def _take_outcomes(self) -> None:
        """Takes all outcomes that have arrived: how transfers have ended on the control thread. Does not wait."""
        outcomes = self._control.outcomes
        while not outcomes.empty():  # mostly: cheaper than an exception
            self._take(outcomes.get_nowait())

    def _take(self, outcome: Outcome | None) -> None:
        """Takes an outcome. None: the scheduler wakes the rank."""
        if outcome is None:
            self._woken = True
            return
        transfer, is_over = outcome
        if not is_over:
            assert transfer.state.failure is not None
            self._failed[transfer.request_id] = transfer.state.failure
            return
        transfer.is_over = True
        if transfer.released:
            self._done.add(transfer.request_id)
