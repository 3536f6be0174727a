# SPDX-License-Identifier: Apache-2.0
"""The prefill side of the scheduler: names the blocks that each step completes, and keeps them until they are sent.

All of it runs on the scheduler's thread.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.core.caches import CacheGroup
from vllm_ascend_pd.core.engine_view import EngineBlocks, EngineRequests, ScheduledRequest
from vllm_ascend_pd.core.observer import Observer, PushBegun, PushEnded, PushRefused
from vllm_ascend_pd.core.role import ConnectorRole
from vllm_ascend_pd.core.step import PrefillStep, Send, WorkerReport
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket, TicketError, parse_ticket
from vllm_ascend_pd.core.ticket_params import (
    MAX_TRANSFER_ID_CHARS,
    TICKET_FOLLOWS,
    TRANSFER_ID,
    carries_ticket,
    expects_ticket,
    is_transfer_id,
)
from vllm_ascend_pd.prefill.held_prompts import HeldPrompts
from vllm_ascend_pd.prefill.outgoing_transfer import OutgoingPrompt, OutgoingTransfer, WindowHolds
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission
from vllm_ascend_pd.transport.wakeup import IdleWait

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

_ABORTED = "the prefill request was aborted"
_ERROR = "prefill ended the request in an error"
_STEP_LOST = "prefill lost a step"
_TAKEN_BACK = "vLLM took back KV that prefill had counted as computed, and did not compute it again"
_CHANGED_STATES = "max_tokens is {}: states change with every token generated"
_MAX_HOST_CHARS = 80


class PrefillScheduler(ConnectorRole):
    """Turns vLLM's steps into steps for the ranks.

    groups: the engine's cache groups.
    requests, blocks: answer questions about the engine's requests and KV blocks.
    idle: decides how long steps wait for transfers.
    admission: decides which tickets are served.
    held: prompts that are computed before their tickets come. None: their blocks are not kept.
    awaits_outputs: whether only the output of a step says what the step has loaded: another connector loads KV, too.
    survives_faults: whether vLLM goes on after a step that failed, so only its output says what it has computed.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        requests: EngineRequests,
        blocks: EngineBlocks,
        idle: IdleWait,
        admission: TicketAdmission,
        observer: Observer | None = None,
        held: HeldPrompts | None = None,
        *,
        awaits_outputs: bool = False,
        survives_faults: bool = False,
    ) -> None:
        self._groups = list(groups)
        self._requests = requests
        self._blocks = blocks
        self._idle = idle
        self._admission = admission
        self._held = held
        self._awaits_outputs = awaits_outputs
        self._survives_faults = survives_faults
        self._has_states = any(group.holds_state for group in groups)
        self._windows = WindowHolds(groups, blocks)
        self._prompts: dict[str, OutgoingPrompt] = {}  # those with a ticket or that wait for one, by request id
        self._transfers: dict[str, OutgoingTransfer] = {}  # those with a ticket, by request id
        self._not_started: dict[str, ScheduledRequest] = {}  # requests that came with a ticket, until they have blocks
        self._refused: dict[str, str] = {}  # requests whose prompts are not sent -> why
        self._served: set[str] = set()  # ids of the tickets of all transfers
        self._step = PrefillStep()  # the next one
        self._observer = observer or Observer()

    @property
    def has_pending_pushes(self) -> bool:
        return any(prompt.ended for prompt in self._prompts.values())

    def bind_block_pool(self, pool: Any) -> None:
        self._blocks.bind(pool)

    def matched_tokens(self, request: ScheduledRequest, num_computed_tokens: int) -> int | None:
        is_ready = self._blocks.is_ready(request)
        may_start = self._held is None or self._held.room.may_start(request.request_id)
        return 0 if is_ready and may_start else None

    @owned
    def add_request(self, request: ScheduledRequest) -> None:
        """Takes note of a new request, before its prompt is looked up in the prefix cache.

        Drops the prompt's last token if decode must compute that itself: a state must be the one before it. A prompt
        without a ticket is cut as well, because it is computed before decode has said anything.
        """
        self._blocks.add_request(request)
        params = request.kv_transfer_params
        if carries_ticket(params):
            self._not_started[request.request_id] = request
            if self._has_states and params.get("num_tokens") == request.num_prompt_tokens - 1 > 0:
                self._requests.drop_last_prompt_token(request)
            if self._windows:
                with suppress(TicketError):  # `allocated` reports it
                    if self._windows.need_whole_prompt(self._parse(request, params)):
                        request.skip_reading_prefix_cache = True
        elif self._held is not None and expects_ticket(params):
            self._expect_ticket(self._held, request, params)

    def _expect_ticket(self, held: HeldPrompts, request: ScheduledRequest, params: Mapping[str, Any]) -> None:
        """Decode's ticket comes later, over the side channel. `params`: the router's or the intent's, from outside."""
        transfer_id = params.get(TRANSFER_ID)
        if transfer_id is None:
            transfer_id = held.transfer_id_of(self._requests.shared_id(request))
        reason = None
        if not is_transfer_id(transfer_id):
            reason = f"{TRANSFER_ID} is not a string of 1 to {MAX_TRANSFER_ID_CHARS} printable characters"
        elif self._has_states and request.max_tokens > 1:
            reason = _CHANGED_STATES.format(request.max_tokens)
            held.refuse(transfer_id, reason)
        elif self._has_states and request.num_prompt_tokens == 1:
            reason = (
                "the prompt is one token, which decode computes itself: states are those before a prompt's last token"
            )
        if reason is not None:
            self._refuse(request, reason)
            return
        assert isinstance(transfer_id, str)
        prompt = OutgoingPrompt(request, self._requests.preemptions(request), is_cut=self._has_states)
        if prompt.is_cut:
            self._requests.drop_last_prompt_token(request)
        self._prompts[request.request_id] = prompt
        held.add(prompt, transfer_id, is_intent=params.get(TICKET_FOLLOWS) is True)

    @owned
    def allocated(self, request: ScheduledRequest, blocks: tuple[list[int], ...], num_external_tokens: int = 0) -> None:
        """Takes the blocks of a request that starts, or runs again after a preemption. `blocks`: per cache group."""
        self._blocks.allocated(request)
        self._not_started.pop(request.request_id, None)
        prompt = self._prompts.get(request.request_id)
        if prompt is not None:
            prompt.start(blocks)
            if self._held is not None:
                self._held.room.started(request.request_id)
            return
        params = request.kv_transfer_params
        if not carries_ticket(params) or request.request_id in self._refused:
            return
        prompt = OutgoingPrompt(request, (self._requests.preemptions(request)[0], False))
        prompt.start(blocks)
        try:
            self._serve(prompt, params)
        except TicketError as error:
            # A client may read the reason, so the host is in the log only.
            host = str(params.get("remote_host"))[:_MAX_HOST_CHARS]
            logger.warning("request %s: no KV will be sent to %r: %s", request.request_id, host, error)
            self._refuse(request, str(error))
        else:
            self._prompts[request.request_id] = prompt

    def _refuse(self, request: ScheduledRequest, reason: str) -> None:
        self._refused[request.request_id] = reason
        self._observer.on(PushBegun(request.request_id, request.trace_headers))
        self._observer.on(PushRefused(request.request_id, reason))

    def _parse(self, request: ScheduledRequest, params: object) -> Ticket:
        return parse_ticket(params, request.num_prompt_tokens, self._groups)

    def _serve(self, prompt: OutgoingPrompt, params: object) -> OutgoingTransfer:
        """Has the ranks send the prompt for a ticket.

        Raises TicketError if the ticket is not for this prompt, or cannot be served.
        """
        request = prompt.request
        ticket = self._parse(request, params)
        if ticket.ticket_id in self._served:
            raise TicketError("this ticket is being served already")
        self._requests.check_prompt(request, ticket)
        if self._has_states and request.max_tokens > 1:
            raise TicketError(_CHANGED_STATES.format(request.max_tokens))
        if self._has_states and ticket.num_tokens != request.num_prompt_tokens:
            raise TicketError(
                f"the ticket is for {ticket.num_tokens} prompt tokens, and states are those behind "
                f"{request.num_prompt_tokens}"
            )
        self._windows.check(ticket, prompt)
        if self._windows.need_whole_prompt(ticket):  # should it start again, or later
            request.skip_reading_prefix_cache = True
        self._admission.admit(ticket)
        transfer = OutgoingTransfer.of(prompt, ticket, self._groups)
        self._served.add(ticket.ticket_id)
        self._transfers[request.request_id] = transfer
        self._observer.on(PushBegun(request.request_id, request.trace_headers))
        return transfer

    @owned
    def build_step(self, output: "SchedulerOutput") -> PrefillStep:
        """Returns the step for the ranks that belongs to vLLM's step `output`."""
        self._blocks.take_adapters()
        step, self._step = self._step, PrefillStep()
        step.computes = output.total_num_scheduled_tokens > 0
        step.weight_updates = self._blocks.weight_updates
        step.preempted = self._preempted(output)
        for new in output.scheduled_new_reqs:
            if prompt := self._running(new.req_id):
                prompt.blocks = [list(ids) for ids in new.block_ids]
                self._computes(step, prompt, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            prompt = self._running(request_id)
            if prompt is None:
                continue
            if request_id in cached.resumed_req_ids and blocks is not None:
                prompt.blocks = [list(ids) for ids in blocks]
            else:
                for known, ids in zip(prompt.blocks, blocks or (), strict=False):
                    known.extend(ids)
            self._computes(step, prompt, computed, output)
        if self._held is not None and not self._held.is_idle:
            self._take_tickets(step, self._held, output.num_scheduled_tokens)
            self._held.make_room(self._without_blocks)
            self._free_expired(step, self._held)
            step.awaits_tickets = self._held.any_ended
            step.wakeup_address = self._held.listener.wakeup_address if step.awaits_tickets else ""
        step.wait_s = self._idle.next(step.computes, news=step.has_news)
        return step

    def _running(self, request_id: str) -> OutgoingPrompt | None:
        prompt = self._prompts.get(request_id)
        return None if prompt is None or prompt.ended else prompt

    def _preempted(self, output: "SchedulerOutput") -> set[str]:
        """Returns the requests whose blocks change hands in this step: the ranks must not read them any more.

        A request may be preempted between two steps, by a reset of the prefix cache, and then be aborted.
        """
        preempted = (output.preempted_req_ids or set()) & self._prompts.keys()
        if not self._requests.names_all_preempted:
            for request_id, prompt in self._prompts.items():
                if self._was_preempted(prompt):
                    transfer = self._transfers.get(request_id)
                    if transfer is None:
                        preempted.add(request_id)
                    elif transfer.announced:
                        transfer.preemption_unreported = True
            if output.total_num_scheduled_tokens:  # without tokens, no blocks change hands yet
                for request_id, transfer in self._transfers.items():
                    if transfer.preemption_unreported:
                        transfer.preemption_unreported = False
                        preempted.add(request_id)
        for request_id in preempted:  # the ranks stop reading its blocks in this step
            self._windows.release(self._prompts[request_id])
            self._prompts[request_id].start(())
        return preempted & self._transfers.keys()

    @owned
    def release_windows(self, request_ids: Collection[str]) -> None:
        """vLLM is about to preempt these requests, and to reset its prefix cache: their blocks must be free then."""
        for request_id in request_ids:
            if (prompt := self._prompts.get(request_id)) is not None:
                self._windows.release(prompt)

    def _was_preempted(self, prompt: OutgoingPrompt) -> bool:
        """Whether the request was preempted since the last call.

        Some schedulers do not name the requests that they preempt, and some of those do not count preemptions either.
        """
        before = prompt.preempted
        prompt.preempted = times, is_now = self._requests.preemptions(prompt.request)
        return times != before[0] or (is_now and not before[1])

    def _computes(self, step: PrefillStep, prompt: OutgoingPrompt, computed: int, output: "SchedulerOutput") -> None:
        """The request runs in this step. `computed`: tokens computed before it."""
        request_id = prompt.request.request_id
        if computed < prompt.done:
            self._take_back(prompt, computed)
        prompt.compute(computed, output.num_scheduled_tokens[request_id])
        if prompt.cached_tokens is None:  # after a preemption, the cache has what the request computed itself
            prompt.cached_tokens = self._requests.cached_tokens(prompt.request)
        if (transfer := self._transfers.get(request_id)) is not None:
            self._advance(step, transfer)
        elif prompt.is_complete:
            self._windows.hold_end(prompt)

    def _advance(self, step: PrefillStep, transfer: OutgoingTransfer) -> None:
        """Adds to `step` what is complete after it and was not sent."""
        prompt, ticket = transfer.prompt, transfer.ticket
        request_id = prompt.request.request_id
        if not transfer.announced:
            transfer.announced = True
            step.tickets[request_id] = ticket
            step.cached_tokens[request_id] = prompt.cached_tokens or 0
        if transfer.complete:
            return
        last = prompt.done >= ticket.num_tokens
        self._windows.hold_for(ticket, prompt, transfer.sent)
        parts = transfer.parts()
        start, stop = max(transfer.sent), max(stop for _, stop in parts)
        if stop <= start and not last:
            return
        blocks = tuple(
            group.holding(ids, *part, last) for ids, group, part in zip(prompt.blocks, self._groups, parts, strict=True)
        )
        alike = all(part == (start, stop) for part in parts)
        # The last token that is generated has no KV.
        grows = last and prompt.done < prompt.request.num_prompt_tokens + prompt.request.max_tokens - 1
        # So nothing of it was loaded, neither in this step nor in one before a preemption.
        in_one_step = prompt.before == 0 and request_id not in step.late and start == ticket.remote_cached_tokens
        is_certain = in_one_step or not self._awaits_outputs
        confirmed = prompt.ended or (is_certain and not self._survives_faults)
        apart = () if alike else tuple(parts)
        step.sends.append(
            Send(request_id, start, stop, blocks, last, apart, grows, confirmed, transfer.again, prompt.ended)
        )
        transfer.sent = [stop for _, stop in parts]
        transfer.complete, transfer.confirmed = last, last and confirmed

    def _take_tickets(self, step: PrefillStep, held: HeldPrompts, scheduled: Mapping[str, int]) -> None:
        """Serves tickets that have come for prompts without one: what is computed already is sent in this step.

        `scheduled`: the requests that run in this step.
        """

        def serve(prompt: OutgoingPrompt, offered: Ticket) -> None:
            transfer = self._serve(prompt, offered)
            if prompt.done:
                request_id = prompt.request.request_id
                if prompt.before or request_id not in scheduled:
                    step.late.add(request_id)
                self._advance(step, transfer)
            if prompt.ended:
                self._step.finished[prompt.request.request_id] = None  # once the ranks have its last part

        held.match(serve)

    def _without_blocks(self) -> list[ScheduledRequest]:
        """Returns the requests with a ticket that have not started, or were preempted."""
        late = [transfer.prompt for transfer in self._transfers.values() if not transfer.prompt.ended]
        return [
            *self._not_started.values(),
            *(each.request for each in late if not each.blocks or self._requests.preemptions(each.request)[1]),
        ]

    def _free_expired(self, step: PrefillStep, held: HeldPrompts) -> None:
        for prompt, reason in held.overdue():
            level = logging.WARNING if prompt.given_up is None else logging.DEBUG
            logger.log(level, "request %s: prefill frees its blocks: %s", prompt.request.request_id, reason)
            held.free(prompt, reason)
            step.unsent.add(prompt.request.request_id)

    def _take_back(self, prompt: OutgoingPrompt, token: int) -> None:
        """KV of the prompt from `token` on is not there, although vLLM had counted it. It is sent again once a step has
        computed it again."""
        prompt.take_back(token, is_lost=bool(self._windows) and token < prompt.request.num_prompt_tokens)
        if (transfer := self._transfers.get(prompt.request.request_id)) is not None:
            transfer.take_back(token)

    @owned
    def loads_failed(self, blocks: Collection[int]) -> None:
        if not blocks:
            return
        wrong = set(blocks)
        for prompt in self._prompts.values():
            if (token := prompt.first_token_in(blocks, self._groups)) is not None:
                wrong.update(prompt.blocks_from(token, self._groups))
                if not prompt.ended:
                    self._take_back(prompt, token)
                    # vLLM has one request compute a shared block again. vLLM 0.30 lets others go on that have computed
                    # from it in a step under way.
                    self._requests.compute_again(prompt.request, token)
            if not prompt.earlier_blocks.isdisjoint(blocks):
                wrong |= prompt.earlier_blocks
                if (transfer := self._transfers.get(prompt.request.request_id)) is not None:
                    transfer.take_back(0)  # it was sent before the preemption
        self._blocks.evict(wrong)  # vLLM leaves some in its prefix cache, even if no step computes them again

    def _evict_computed(self, prompt: OutgoingPrompt) -> None:
        """Takes what an aborted request has computed or loaded out of the prefix cache.

        A step under way may still report that a load has failed. vLLM then evicts only blocks of requests that run.
        """
        token = self._requests.own_cached_tokens(prompt.request)
        self._blocks.evict({*prompt.blocks_from(token, self._groups), *prompt.earlier_blocks})

    @owned
    def update(self, report: WorkerReport | None, ended: set[str]) -> None:
        if report is not None:
            if self._blocks.weights_updated(report.weight_updates) and self._held is not None:
                self._held.give_up("prefill's weights were updated, or it slept, after it had computed the prompt")
            for request_id, reason in report.failed.items():
                if transfer := self._transfers.get(request_id):
                    transfer.failure = transfer.failure or reason
        for request_id in ended:
            if (prompt := self._prompts.get(request_id)) and prompt.ended:
                self._forget(prompt)

    @owned
    def steps_lost(self) -> None:
        """Has each rank report all prompts anew. Their transfers fail: a rank may not have heard what to send.

        A rank that has not heard of a ticket, or has reported it before, reports it as sent at once.
        """
        self._blocks.drop_cached()  # vLLM keeps blocks that the lost steps were to compute
        for request_id, transfer in self._transfers.items():
            transfer.failure = transfer.failure or _STEP_LOST
            self._step.finished[request_id] = transfer.failure
        # Those that wait for a ticket go on waiting: vLLM has seen the outputs of all their steps.
        self._step.report_again = {name for name, prompt in self._prompts.items() if prompt.transfer_id is None}

    @owned
    def end_request(self, request: ScheduledRequest) -> tuple[bool, dict[str, Any] | None]:
        """The request ended. Returns two things.

        - Whether vLLM must keep its blocks until all ranks have reported it as sent.
        - What its response says: where decode's ticket is taken if it has none, `{"error": reason}` if its KV is not
          delivered, else None. `"refused": True` beside the reason: the ticket or the prompt cannot be served.
        """
        request_id = request.request_id
        self._not_started.pop(request_id, None)
        if (reason := self._refused.pop(request_id, None)) is not None:
            return False, {"error": reason, "refused": True}
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return False, None
        if self._awaits_outputs and self._requests.was_aborted(request):
            self._evict_computed(prompt)
        transfer = self._transfers.get(request_id)
        if transfer is None:
            assert self._held is not None
            return self._ended_without_ticket(self._held, prompt)
        incomplete = None if transfer.confirmed else self._why_incomplete(prompt, transfer.complete)
        transfer.failure = transfer.failure or incomplete
        params = None if transfer.failure in (None, _ABORTED) else {"error": transfer.failure}
        if not transfer.announced:
            self._forget(prompt)
            return False, params
        # The transfer stays until the ranks have told decode. Until then decode takes any second writer of the ticket
        # for the first one (R2).
        prompt.ended = True
        self._step.finished[request_id] = incomplete
        return True, params

    def _why_incomplete(self, prompt: OutgoingPrompt, complete: bool) -> str | None:
        """Returns why the KV of a prompt whose request has ended is not complete; None if it is.

        `complete`: whether the steps were to complete it. It is if vLLM has seen their outputs, too.
        """
        if self._requests.ended_in_error(prompt.request):
            return _ERROR
        if self._requests.was_aborted(prompt.request):
            return _ABORTED
        return None if complete else _TAKEN_BACK

    def _ended_without_ticket(self, held: HeldPrompts, prompt: OutgoingPrompt) -> tuple[bool, dict[str, Any] | None]:
        """As `end_request`, of a request whose ticket has not come."""
        held.make_room(self._without_blocks)
        reason = self._why_incomplete(prompt, prompt.is_complete) or prompt.given_up
        if reason is not None:
            held.free(prompt, reason)
            self._forget(prompt)
            return False, None if reason is _ABORTED else {"error": reason}
        prompt.ended = True
        return True, held.end_request(prompt)

    def _forget(self, prompt: OutgoingPrompt) -> None:
        request_id = prompt.request.request_id
        self._windows.release(prompt)
        del self._prompts[request_id]
        if (transfer := self._transfers.pop(request_id, None)) is not None:
            self._served.discard(transfer.ticket.ticket_id)
            self._admission.release(transfer.ticket, delivered=transfer.failure is None)
            self._observer.on(PushEnded(request_id, transfer.ticket, transfer.failure))
            if self._held is not None:
                self._held.listener.end(transfer.ticket.ticket_id, None if transfer.announced else transfer.failure)
