# SPDX-License-Identifier: Apache-2.0
"""The prefill side of the scheduler: says which blocks become complete in which step, and holds them until sent."""

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_ascend_pd.connector import cached_tokens, compat
from vllm_ascend_pd.connector.old_weights import OldWeights
from vllm_ascend_pd.connector.prompts import Prompts
from vllm_ascend_pd.connector.spans import CACHED_TOKENS, DECODE_ENGINE, REQUEST_ID, TOKENS, TransferSpan
from vllm_ascend_pd.core import stats
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.groups import CacheGroup, TokenGroup
from vllm_ascend_pd.core.hosts import AnyHost
from vllm_ascend_pd.core.plan import NULL_BLOCK
from vllm_ascend_pd.core.step import PrefillStep, Send, WorkerReport
from vllm_ascend_pd.core.ticket import Ticket, TicketError, carries_ticket, parse_ticket
from vllm_ascend_pd.prefill.ticket_admission import Admission
from vllm_ascend_pd.transport.idle_wait import IdleWait

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class _Sending:
    """A request with a ticket. `align`: what a part that is not the last must be a multiple of, in tokens; `sent`:
    tokens up to here were handed to the ranks; `held`: blocks of windows that the ranks read or will, of each cache
    group those before its block number `held_to`; `announced`: the ranks have the ticket; `sealed`: and all of the
    prompt; `preempted`: how often it was, and whether it is, as `was_preempted` saw last; `failure`: why not all of it
    is sent."""

    request: "Request"
    ticket: Ticket
    span: TransferSpan
    blocks: list[list[int]]
    align: int
    sent: int
    held: "list[KVCacheBlock]" = field(default_factory=list)
    held_to: dict[int, int] = field(default_factory=dict)
    announced: bool = False
    sealed: bool = False
    preempted: tuple[int, bool] = (0, False)
    failure: str | None = None

    def was_preempted(self) -> bool:
        """Since this was asked last. Not all schedulers say whom they preempt, nor do all of them count it."""
        before = self.preempted
        self.preempted = times, is_now = self.request.num_preemptions, self.request.status is RequestStatus.PREEMPTED
        return times != before[0] or (is_now and not before[1])

    def end_span(self) -> None:
        about: dict[str, str | int] = {
            REQUEST_ID: self.ticket.request_id,
            DECODE_ENGINE: self.ticket.remote_engine_id,
            TOKENS: self.ticket.num_tokens - self.ticket.remote_cached_tokens,
            CACHED_TOKENS: self.ticket.remote_cached_tokens,
        }
        self.span.end(about, None if self.failure is None else "not_delivered", self.failure or "")


class PrefillScheduler:
    """`admission`: which tickets are served; None: whoever's."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        idle: IdleWait,
        admission: Admission | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        self._groups = list(groups)
        self._idle = idle
        self._admission = admission or Admission(AnyHost())
        self._prompts = prompts or Prompts()
        self._state_groups = frozenset(i for i, group in enumerate(groups) if group.holds_state)
        self._sending: dict[str, _Sending] = {}
        self._tickets: set[str] = set()
        self._errors: dict[str, str] = {}
        self._awaiting: dict[str, _Sending] = {}  # ended, and not reported by all ranks
        self._unnamed: set[str] = set()  # preempted, without vLLM's saying so
        self._pool: BlockPool | None = None
        self._old_weights = OldWeights()
        self._step = PrefillStep()
        self._stats = stats.Stats()

    @property
    def has_pending_pushes(self) -> bool:
        return bool(self._awaiting)

    def bind(self, pool: "BlockPool") -> None:
        """`pool`: which all groups' blocks are from."""
        self._pool = pool
        self._old_weights.bind(pool)

    def arrived(self, request: "Request") -> None:
        """A request is new. Where decode's blocks of a window are longer than ours, its whole prompt is computed,
        whatever the prefix cache has of it: of a window, vLLM keeps our blocks that the next token sees, and decode's
        first block begins before those."""
        windowed = [(i, g.span) for i, g in enumerate(self._groups) if isinstance(g, TokenGroup) and g.windowed]
        if windowed and carries_ticket(params := request.kv_transfer_params):
            with suppress(TicketError):  # which `allocated` tells
                ticket = parse_ticket(params, request.num_prompt_tokens, len(self._groups), self._state_groups)
                if any(ticket.span(i) > span for i, span in windowed):
                    request.skip_reading_prefix_cache = True

    def prepare(self, request: "Request") -> None:
        """The request is about to be allocated: cuts it short where decode must compute the last token itself."""
        params, length = request.kv_transfer_params, request.num_prompt_tokens
        if self._state_groups and carries_ticket(params) and params.get("num_tokens") == length - 1 > 0:
            compat.drop_last_prompt_token(request)

    def allocated(self, request: "Request", blocks: tuple[list[int], ...]) -> None:
        """The request is about to run, for the first time or again after preemption."""
        self._old_weights.begins(request)
        sending = self._sending.get(request.request_id)
        if sending is not None:
            sending.blocks = [list(ids) for ids in blocks]
            return
        params = request.kv_transfer_params
        if not carries_ticket(params) or request.request_id in self._errors:
            return
        span = TransferSpan("kv_push", request)
        try:
            ticket = parse_ticket(params, request.num_prompt_tokens, len(self._groups), self._state_groups)
            if ticket.ticket_id in self._tickets:
                raise TicketError("this ticket is being served already")
            self._prompts.check(request, ticket)
            if self._state_groups and request.max_tokens > 1:
                raise TicketError(f"max_tokens is {request.max_tokens}: states change with every token generated")
            self._admission.admit(ticket)
        except TicketError as error:
            host = str(params.get("remote_host"))[:80]  # which no reason names that a client may read
            logger.warning("request %s: no KV will be sent to %r: %s", request.request_id, host, error)
            self._errors[request.request_id] = str(error)
            self._stats.add(stats.PUSH_FAILURES, reason=PushFailure.TICKET.value)
            span.end({}, PushFailure.TICKET.value, str(error))
            return
        self._tickets.add(ticket.ticket_id)
        self._sending[request.request_id] = _Sending(
            request,
            ticket,
            span,
            [list(ids) for ids in blocks],
            math.lcm(*_spans(self._groups), *(ticket.span(group) for group in range(len(self._groups)))),
            ticket.remote_cached_tokens,
            preempted=(request.num_preemptions, False),
        )

    def build_step(self, output: "SchedulerOutput") -> PrefillStep:
        step, self._step = self._step, PrefillStep()
        step.wait_s = self._idle.next(output.total_num_scheduled_tokens > 0, news=step != PrefillStep())
        step.weight_updates = self._old_weights.known_updates
        step.preempted = self._preempted(output)
        for request_id in step.preempted:  # the ranks will not read on, be it for a failure
            self._let_go(self._sending.get(request_id) or self._awaiting[request_id])
        for new in output.scheduled_new_reqs:
            if sending := self._sending.get(new.req_id):
                sending.blocks = [list(ids) for ids in new.block_ids]
                self._advance(step, new.req_id, sending, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            sending = self._sending.get(request_id)
            if sending is None:
                continue
            if request_id in cached.resumed_req_ids and blocks is not None:
                sending.blocks = [list(ids) for ids in blocks]
            else:
                for known, ids in zip(sending.blocks, blocks or (), strict=False):
                    known.extend(ids)
            self._advance(step, request_id, sending, computed, output)
        return step

    def _preempted(self, output: "SchedulerOutput") -> set[str]:
        """Requests whose blocks change hands in this step, and are not to be read any more. One that was preempted
        between two steps (a prefix cache reset) and then aborted is in `_awaiting`."""
        held = {**self._sending, **self._awaiting}
        preempted = (output.preempted_req_ids or set()) & held.keys()
        if not compat.NAMES_ALL_PREEMPTED:
            self._unnamed |= {r for r, sending in held.items() if sending.was_preempted() and sending.announced}
            if output.total_num_scheduled_tokens:  # else no blocks change hands yet
                preempted |= self._unnamed & held.keys()
                self._unnamed = set()
        return preempted

    def update(self, report: WorkerReport | None, finished_sending: set[str]) -> None:
        """Takes note of what the ranks reported."""
        if report is not None:
            self._old_weights.reported(report.weight_updates)
            for request_id, reason in report.failed.items():
                if request_id in self._sending:
                    self._errors.setdefault(request_id, reason)
                sending = self._sending.get(request_id) or self._awaiting.get(request_id)
                if sending is not None:
                    sending.failure = sending.failure or reason
        for request_id in finished_sending:
            if sending := self._awaiting.pop(request_id, None):
                self._let_go(sending)
                self._end(sending)
            self._errors.pop(request_id, None)

    def take_stats(self) -> stats.Data:
        return self._stats.take()

    def finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """The request ended. Returns whether its blocks must be kept until all ranks have reported it as sent, and
        what its response says."""
        sending = self._sending.pop(request.request_id, None)
        error = self._errors.pop(request.request_id, None)
        params = {"error": error} if error is not None else None
        if sending is None:
            return False, params
        aborted = None if sending.sealed else "the prefill request was aborted"
        sending.failure = sending.failure or aborted
        if not sending.announced:
            self._end(sending)
            return False, params
        self._step.finished[request.request_id] = aborted
        # Until the ranks have told decode, it takes a second writer of the ticket for the first one (R2).
        self._awaiting[request.request_id] = sending
        return True, params

    def _advance(
        self, step: PrefillStep, request_id: str, sending: _Sending, computed: int, output: "SchedulerOutput"
    ) -> None:
        """Hands out what this step completes: whole units as they fill, the rest with the prompt's last token."""
        if not sending.announced:
            sending.announced = True
            step.tickets[request_id] = sending.ticket
            # Now, as it runs for the first time: what vLLM finds in its cache after a preemption, it has computed.
            step.cached_tokens[request_id] = cached_tokens.found(sending.request)
        if sending.sealed:
            return
        total = sending.ticket.num_tokens
        done = computed + output.num_scheduled_tokens[request_id]
        last = done >= total
        for index, group in enumerate(self._groups):
            if isinstance(group, TokenGroup) and group.windowed:
                self._hold(sending, index, group.span, min(done, total))
        start, stop = sending.sent, total if last else done - done % sending.align
        if stop <= start and not last:
            return
        stop = max(start, stop)
        blocks = tuple(
            group.holding(ids, start, stop, last) for ids, group in zip(sending.blocks, self._groups, strict=True)
        )
        step.sends.append(Send(request_id, start, stop, blocks, last))
        sending.sent = stop
        sending.sealed = last

    def _hold(self, sending: _Sending, index: int, span: int, done: int) -> None:
        """Of a window vLLM gives blocks away while the request runs on, and again when it ends. Those that decode has
        blocks for must stay as they are from when they are computed, though decode's longer ones may have to fill up
        first, until they are sent (R3). `done`: tokens that are computed after this step."""
        assert self._pool is not None
        d_blocks, d_span = sending.ticket.remote_block_ids[index], sending.ticket.span(index)
        first, stop = max(sending.held_to.get(index, 0), sending.sent // span), math.ceil(done / span)
        for number in range(first, stop):
            block = sending.blocks[index][number]
            wanted = d_blocks[number * span // d_span : math.ceil((number + 1) * span / d_span)]
            if block != NULL_BLOCK and any(d_block != NULL_BLOCK for d_block in wanted):
                sending.held.append(self._pool.blocks[block])
                self._pool.touch(sending.held[-1:])
        sending.held_to[index] = max(first, stop)

    def _end(self, sending: _Sending) -> None:
        self._tickets.discard(sending.ticket.ticket_id)
        self._admission.ended(sending.ticket, delivered=sending.failure is None)
        sending.end_span()

    def _let_go(self, sending: _Sending) -> None:
        if sending.held:
            assert self._pool is not None
            self._pool.free_blocks(sending.held)
            sending.held = []
        sending.held_to = {}


def _spans(groups: Iterable[CacheGroup]) -> list[int]:
    """Tokens per block of the groups whose blocks fill up with tokens."""
    return [group.span for group in groups if isinstance(group, TokenGroup)]
