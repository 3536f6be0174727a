# SPDX-License-Identifier: Apache-2.0
"""The prefill side of the scheduler: names the blocks that each step completes, and keeps them until they are sent.

All of it runs on the scheduler's thread.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.core.engine_view import EngineBlocks, EngineRequests, ScheduledRequest
from vllm_ascend_pd.core.groups import CacheGroup, TokenGroup
from vllm_ascend_pd.core.observer import PrefillSchedulerObserver
from vllm_ascend_pd.core.plan import NULL_BLOCK
from vllm_ascend_pd.core.step import PrefillStep, Send, WorkerReport
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket, TicketError, carries_ticket, parse_ticket
from vllm_ascend_pd.prefill.ticket_admission import TicketAdmission
from vllm_ascend_pd.transport.idle_wait import IdleWait

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

_ABORTED = "the prefill request was aborted"
_MAX_HOST_CHARS = 80


@dataclass
class _OutgoingTransfer:
    """A request with a ticket, from its first allocation until all ranks have reported it as sent."""

    request: ScheduledRequest
    ticket: Ticket
    # Ids of the request's blocks, per cache group.
    blocks: list[list[int]]
    # Tokens: each part of the prompt but the last one ends at a multiple of this.
    align: int
    # How many tokens of the prompt were handed to the ranks, or are cached on decode.
    sent: int
    # How often vLLM had preempted the request, and whether it was preempted, when `was_preempted` last looked.
    preempted: tuple[int, bool]
    # Whether the ranks have the ticket.
    announced: bool = False
    # Whether the ranks have all of the prompt.
    complete: bool = False
    # Whether vLLM has ended the request. The ranks may still read its blocks.
    ended: bool = False
    # Whether it was preempted in a step that computed nothing, and the ranks do not know.
    preemption_unsaid: bool = False
    # Blocks of windows that were held for the ranks to read.
    held: list[int] = field(default_factory=list)
    # Cache group -> number of the first block that was not looked at for holding.
    held_to: dict[int, int] = field(default_factory=dict)
    # Why the prompt was not sent whole. None: nothing has failed.
    failure: str | None = None


class PrefillScheduler:
    """Turns vLLM's steps into steps for the ranks.

    groups: the engine's cache groups.
    requests, blocks: answer questions about the engine's requests and KV blocks.
    idle: decides how long steps wait for transfers.
    admission: decides which tickets are served.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        requests: EngineRequests,
        blocks: EngineBlocks,
        idle: IdleWait,
        admission: TicketAdmission,
        observer: PrefillSchedulerObserver | None = None,
    ) -> None:
        self._groups = list(groups)
        self._requests = requests
        self._blocks = blocks
        self._idle = idle
        self._admission = admission
        self._state_groups = frozenset(i for i, group in enumerate(groups) if group.holds_state)
        self._windowed = [(i, g) for i, g in enumerate(groups) if isinstance(g, TokenGroup) and g.windowed]
        self._transfers: dict[str, _OutgoingTransfer] = {}  # by request id
        self._refused: dict[str, str] = {}  # requests whose tickets are not served -> why
        self._served: set[str] = set()  # ids of the tickets of all transfers
        self._step = PrefillStep()  # the next one
        self._observer = observer or PrefillSchedulerObserver()

    @property
    def has_pending_pushes(self) -> bool:
        """Whether a request has ended whose blocks the ranks may still read."""
        return any(transfer.ended for transfer in self._transfers.values())

    @owned
    def arrived(self, request: ScheduledRequest) -> None:
        """Takes note of a new request, before its prompt is looked up in the prefix cache.

        The whole prompt is computed if decode's blocks of a window are longer than this engine's. For a window, vLLM
        caches only the blocks that the next token sees, and decode's first block begins before those.
        """
        params = request.kv_transfer_params
        if self._windowed and carries_ticket(params):
            with suppress(TicketError):  # `allocated` reports it
                ticket = parse_ticket(params, request.num_prompt_tokens, len(self._groups), self._state_groups)
                if any(ticket.span(i) > group.span for i, group in self._windowed):
                    request.skip_reading_prefix_cache = True

    @owned
    def prepare(self, request: ScheduledRequest) -> None:
        """Drops the prompt's last token if decode must compute that itself. Called before the request is allocated.

        A state must be the one before the last token: decode computes that token again.
        """
        params, length = request.kv_transfer_params, request.num_prompt_tokens
        if self._state_groups and carries_ticket(params) and params.get("num_tokens") == length - 1 > 0:
            self._requests.drop_last_prompt_token(request)

    @owned
    def allocated(self, request: ScheduledRequest, blocks: tuple[list[int], ...]) -> None:
        """Takes the blocks of a request that starts, or runs again after a preemption. `blocks`: per cache group."""
        self._blocks.allocated(request)
        transfer = self._transfers.get(request.request_id)
        if transfer is not None:
            transfer.blocks = [list(ids) for ids in blocks]
            return
        if not carries_ticket(request.kv_transfer_params) or request.request_id in self._refused:
            return
        self._observer.transfer_began(request.request_id, request.trace_headers)
        try:
            ticket = self._admitted_ticket(request)
        except TicketError as error:
            # A client may read the reason, so the host is in the log only.
            host = str(request.kv_transfer_params.get("remote_host"))[:_MAX_HOST_CHARS]
            logger.warning("request %s: no KV will be sent to %r: %s", request.request_id, host, error)
            self._refused[request.request_id] = str(error)
            self._observer.ticket_refused(request.request_id, str(error))
            return
        own_spans = [group.span for group in self._groups if isinstance(group, TokenGroup)]
        self._served.add(ticket.ticket_id)
        self._transfers[request.request_id] = _OutgoingTransfer(
            request,
            ticket,
            [list(ids) for ids in blocks],
            align=math.lcm(*own_spans, *(ticket.span(group) for group in range(len(self._groups)))),
            sent=ticket.remote_cached_tokens,
            preempted=(self._requests.preemptions(request)[0], False),
        )

    def _admitted_ticket(self, request: ScheduledRequest) -> Ticket:
        """Returns the request's ticket. Raises TicketError if it is not served."""
        params, length = request.kv_transfer_params, request.num_prompt_tokens
        ticket = parse_ticket(params, length, len(self._groups), self._state_groups)
        if ticket.ticket_id in self._served:
            raise TicketError("this ticket is being served already")
        self._requests.check_prompt(request, ticket)
        if self._state_groups and request.max_tokens > 1:
            raise TicketError(f"max_tokens is {request.max_tokens}: states change with every token generated")
        self._admission.admit(ticket)
        return ticket

    @owned
    def build_step(self, output: "SchedulerOutput") -> PrefillStep:
        """Returns the step for the ranks that belongs to vLLM's step `output`."""
        step, self._step = self._step, PrefillStep()
        step.wait_s = self._idle.next(output.total_num_scheduled_tokens > 0, news=step != PrefillStep())
        step.weight_updates = self._blocks.weight_updates
        step.preempted = self._preempted(output)
        for request_id in step.preempted:  # the ranks stop reading its blocks in this step
            self._release_held(self._transfers[request_id])
        for new in output.scheduled_new_reqs:
            if transfer := self._running(new.req_id):
                transfer.blocks = [list(ids) for ids in new.block_ids]
                self._advance(step, transfer, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            transfer = self._running(request_id)
            if transfer is None:
                continue
            if request_id in cached.resumed_req_ids and blocks is not None:
                transfer.blocks = [list(ids) for ids in blocks]
            else:
                for known, ids in zip(transfer.blocks, blocks or (), strict=False):
                    known.extend(ids)
            self._advance(step, transfer, computed, output)
        return step

    def _running(self, request_id: str) -> _OutgoingTransfer | None:
        transfer = self._transfers.get(request_id)
        return None if transfer is None or transfer.ended else transfer

    def _preempted(self, output: "SchedulerOutput") -> set[str]:
        """Returns the requests whose blocks change hands in this step: the ranks must not read them any more.

        A request may be preempted between two steps, by a reset of the prefix cache, and then be aborted.
        """
        preempted = (output.preempted_req_ids or set()) & self._transfers.keys()
        if not self._requests.names_all_preempted:
            for transfer in self._transfers.values():
                if self._was_preempted(transfer) and transfer.announced:
                    transfer.preemption_unsaid = True
            if output.total_num_scheduled_tokens:  # without tokens, no blocks change hands yet
                for request_id, transfer in self._transfers.items():
                    if transfer.preemption_unsaid:
                        transfer.preemption_unsaid = False
                        preempted.add(request_id)
        return preempted

    def _was_preempted(self, transfer: _OutgoingTransfer) -> bool:
        """Whether the request was preempted since the last call.

        Some schedulers do not name the requests that they preempt, and some of those do not count preemptions either.
        """
        before = transfer.preempted
        transfer.preempted = times, is_now = self._requests.preemptions(transfer.request)
        return times != before[0] or (is_now and not before[1])

    def _advance(
        self, step: PrefillStep, transfer: _OutgoingTransfer, computed: int, output: "SchedulerOutput"
    ) -> None:
        """Adds to `step` what the request completes in it.

        Whole blocks leave as they fill up, and the rest with the prompt's last token. `computed`: tokens computed
        before this step.
        """
        request_id, ticket = transfer.request.request_id, transfer.ticket
        if not transfer.announced:
            transfer.announced = True
            step.tickets[request_id] = ticket
            # Read when the request runs for the first time: after a preemption, the cache has what it computed itself.
            step.cached_tokens[request_id] = self._requests.cached_tokens(transfer.request)
        if transfer.complete:
            return
        total = ticket.num_tokens
        done = computed + output.num_scheduled_tokens[request_id]
        last = done >= total
        for index, group in self._windowed:
            self._hold(transfer, index, group.span, min(done, total))
        start, stop = transfer.sent, total if last else done - done % transfer.align
        if stop <= start and not last:
            return
        stop = max(start, stop)
        blocks = tuple(
            group.holding(ids, start, stop, last) for ids, group in zip(transfer.blocks, self._groups, strict=True)
        )
        step.sends.append(Send(request_id, start, stop, blocks, last))
        transfer.sent = stop
        transfer.complete = last

    def _hold(self, transfer: _OutgoingTransfer, index: int, span: int, done: int) -> None:
        """Holds blocks of a window that decode has blocks for, from when they are computed until they are sent (R3).

        vLLM reuses blocks that have left a window while the request still runs, and all of them when it ends. Sending
        may be later than computing: decode's blocks may be longer, and must fill up first.

        `index`: the cache group. `span`: its tokens per block. `done`: tokens that are computed after this step.
        """
        decode_blocks, decode_span = transfer.ticket.remote_block_ids[index], transfer.ticket.span(index)
        first, stop = max(transfer.held_to.get(index, 0), transfer.sent // span), math.ceil(done / span)
        for number in range(first, stop):
            block = transfer.blocks[index][number]
            wanted = decode_blocks[number * span // decode_span : math.ceil((number + 1) * span / decode_span)]
            if block != NULL_BLOCK and any(decode_block != NULL_BLOCK for decode_block in wanted):
                self._blocks.hold([block])
                transfer.held.append(block)
        transfer.held_to[index] = max(first, stop)

    def _release_held(self, transfer: _OutgoingTransfer) -> None:
        if transfer.held:
            self._blocks.release(transfer.held)
            transfer.held = []
        transfer.held_to = {}

    @owned
    def update(self, report: WorkerReport | None, finished_sending: set[str]) -> None:
        """Takes the ranks' report of a step. `finished_sending`: ids of requests that all ranks have ended with."""
        if report is not None:
            self._blocks.weights_updated(report.weight_updates)
            for request_id, reason in report.failed.items():
                if transfer := self._transfers.get(request_id):
                    transfer.failure = transfer.failure or reason
        for request_id in finished_sending:
            if (transfer := self._transfers.get(request_id)) and transfer.ended:
                self._release_held(transfer)
                self._forget(transfer)

    @owned
    def finished(self, request: ScheduledRequest) -> tuple[bool, dict[str, Any] | None]:
        """The request ended. Returns two things.

        - Whether vLLM must keep its blocks until all ranks have reported it as sent.
        - What its response says: `{"error": reason}` if its KV is not delivered, else None.
        """
        request_id = request.request_id
        if (reason := self._refused.pop(request_id, None)) is not None:
            return False, {"error": reason}
        transfer = self._transfers.get(request_id)
        if transfer is None:
            return False, None
        params = None if transfer.failure is None else {"error": transfer.failure}
        aborted = None if transfer.complete else _ABORTED
        transfer.failure = transfer.failure or aborted
        if not transfer.announced:
            self._forget(transfer)
            return False, params
        # The transfer stays until the ranks have told decode. Until then decode takes any second writer of the ticket
        # for the first one (R2).
        transfer.ended = True
        self._step.finished[request_id] = aborted
        return True, params

    def _forget(self, transfer: _OutgoingTransfer) -> None:
        del self._transfers[transfer.request.request_id]
        self._served.discard(transfer.ticket.ticket_id)
        self._admission.ended(transfer.ticket, delivered=transfer.failure is None)
        self._observer.transfer_ended(transfer.request.request_id, transfer.ticket, transfer.failure)
