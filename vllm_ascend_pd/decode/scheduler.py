# SPDX-License-Identifier: Apache-2.0
"""The decode side of the scheduler: issues a ticket per request, and follows it until its KV has arrived.

All of it runs on the scheduler's thread. What sends tickets has threads of its own, and this one polls it.

A decode engine that computes no prompts (`who_computes: never`) has prefill compute everything: a request that was
preempted, or whose KV was lost, gets another ticket. That ticket is for the prompt and all tokens generated since, so
prefill must be asked by token ids. What cannot be asked for in this way ends with an error.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.core.engine_view import EngineBlocks, EngineRequests, ScheduledRequest
from vllm_ascend_pd.core.observer import KvVerified, Observer, ReceiveEnded, ReceiveFailed, ThresholdSet, TicketIssued
from vllm_ascend_pd.core.protocol import MAX_FAILURE_CHARS, TransferFailure
from vllm_ascend_pd.core.reasons import Decision, Reason, ReceiveFailure
from vllm_ascend_pd.core.role import ConnectorRole
from vllm_ascend_pd.core.step import DecodeStep, WorkerReport
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.ticket_params import is_pulled, names_prefill, prefill_wait_s, wants_ticket, wants_token_ids
from vllm_ascend_pd.decode.intents import Intents, LongPrompt
from vllm_ascend_pd.decode.ticket_client import NoRecipientError
from vllm_ascend_pd.decode.tickets import TicketIssuer, TicketRecipient, TicketRecipients
from vllm_ascend_pd.decode.who_computes import PromptPlacement
from vllm_ascend_pd.transport.wakeup import IdleWait

MAX_LOST = 3
"""How many tickets in a row may lose their KV until the request ends. Prefill's own retries are not counted."""

_NEVER = "this decode engine computes no prompts (who_computes: never)"
_FREED = f"{_NEVER}, it has lost the KV, and the prefill engine that held the prompt has freed it: ask prefill again"


def why_refused(request: ScheduledRequest) -> str | None:
    """Why a new request is refused whatever is cached; None if it is not."""
    if request.skip_reading_prefix_cache:
        return f"{_NEVER}: prompt_logprobs, or a prompt that is to be computed anew, does not work here"
    if request.resumable:
        return f"{_NEVER}: a prompt that is added to while its request runs does not work here"
    return None


def why_no_ticket(request: ScheduledRequest, requests: EngineRequests) -> str | None:
    """Why prefill cannot be asked for a request's tokens; None if it can."""
    params = request.kv_transfer_params
    if not wants_ticket(params):
        return f"{_NEVER}, and the request names no metaserver that would have prefill compute its own: use the proxy"
    if not request.num_output_tokens:
        return None
    preempted = f"{_NEVER}, and it preempted the request after {request.num_output_tokens} tokens"
    if requests.token_ids(request) is None:
        return f"{preempted}: its prompt is more than text, so prefill cannot be asked to go on from there"
    if not wants_token_ids(params):
        return f"{preempted}: its metaserver takes no token ids, so prefill cannot be asked to go on from there"
    return None


logger = logging.getLogger(__name__)

_CLOSE_OBSERVER_S = 2.0
_ABORTED = "the request was aborted"
_STEP_LOST = "decode lost a step"


@dataclass
class _IncomingTransfer:
    """The latest ticket that was issued for a request.

    The entry goes when both have happened: all ranks have reported the transfer's end, and the request has ended. If
    the request gets another ticket instead, that one's entry takes its place.
    """

    request_id: str
    ticket: Ticket
    # Who gets the ticket. None: the request names nobody who may.
    recipient: TicketRecipient | None = None
    # The request's token ids, if they are wanted with the ticket.
    token_ids: list[int] = field(default_factory=list)
    # Whether all ranks have reported that nobody can write for the ticket any more.
    ranks_ended: bool = False
    # Whether vLLM has ended the request.
    request_ended: bool = False
    # Why the transfer failed, in words and as a kind. None: it has not failed.
    failure: str | None = None
    cause: ReceiveFailure | None = None
    # Whether another ticket may get the KV that did not come: it was lost, or the metaserver says so of its prefill.
    may_follow: bool = False
    # Bytes received, and how many of them before prefill ended. Summed over ranks.
    received: tuple[int, int] = (0, 0)
    # How long the prompt was to wait in prefill's queue, in seconds, as the proxy said.
    prefill_wait_s: float = 0.0
    # Whether the ticket follows an intent, and how long prefill took for that, in seconds.
    follows_intent: bool = False
    computed_s: float = 0.0
    # Whether the request has had its turn to run since the transfer has ended.
    started: bool = False
    # How many tokens of the prompt prefill had in its cache, the least over ranks and tickets. None: not reported.
    cached_tokens: int | None = None
    # As `received`, of the request's earlier tickets.
    received_before: tuple[int, int] = (0, 0)
    # How many of the request's tickets right before this one failed.
    lost_before: int = 0
    # Monotonic seconds. A simulation replaces the clock, so it is looked up when it is read.
    issued_at: float = field(default_factory=lambda: time.monotonic())

    @property
    def all_received(self) -> tuple[int, int]:
        """As `received`, of all the request's tickets."""
        return self.received[0] + self.received_before[0], self.received[1] + self.received_before[1]

    def why_not_again(self) -> str | None:
        """Why the request gets no further ticket; None if it may get one."""
        if self.failure is None:
            return None
        if not self.may_follow:  # no metaserver, or no retry is left there
            return self.failure
        lost = self.lost_before + 1
        return None if lost < MAX_LOST else f"KV was lost {lost} times in a row, at last: {self.failure}"


class DecodeScheduler(ConnectorRole):
    """Issues tickets and tracks their transfers.

    issuer: makes the tickets.
    requests, blocks: answer questions about the engine's requests and KV blocks.
    recipients: finds who gets each ticket. The scheduler closes it.
    placement: decides who computes prompts.
    idle: decides how long steps wait for KV. The scheduler closes it.
    failed_wait_s: how long a request whose transfer has failed waits until prefill has stopped writing. Then it ends
    with an error, and only its blocks wait.
    intents: the prompts that prefill computes before they get blocks.
    may_compute: whether this engine computes a prompt that prefill has failed to compute.
    observer: is told of the transfers' milestones. The scheduler closes it.
    """

    def __init__(
        self,
        issuer: TicketIssuer,
        requests: EngineRequests,
        blocks: EngineBlocks,
        recipients: TicketRecipients,
        placement: PromptPlacement,
        idle: IdleWait,
        failed_wait_s: float,
        intents: Intents,
        may_compute: bool,
        observer: Observer | None = None,
    ) -> None:
        self._issuer = issuer
        self._intents = intents
        self._may_compute = may_compute
        self._requests = requests
        self._blocks = blocks
        self._placement = placement
        self._recipients = recipients
        self._idle = idle
        self._failed_wait_s = failed_wait_s
        self._observer = observer or Observer()
        self._transfers: dict[str, _IncomingTransfer] = {}  # by request id
        self._by_ticket: dict[str, _IncomingTransfer] = {}  # the same, by ticket id
        self._to_send: dict[str, _IncomingTransfer] = {}  # by ticket id: they leave with the next step
        self._without_ticket: set[str] = set()  # requests whose held prompts were released without a ticket
        self._refused: dict[str, str] = {}  # requests that vLLM has to end with an error -> why
        self._to_end: list[str] = []  # those of them that vLLM has not been told of
        # Request id -> when its request ends, in monotonic seconds: transfers that have failed, but that prefill may
        # still write for. In order of time.
        self._failed_waits: dict[str, float] = {}
        self._step = DecodeStep()  # the next one

    @owned
    def bind_block_pool(self, pool: Any) -> None:
        self._blocks.bind(pool)

    @owned
    def add_request(self, request: ScheduledRequest) -> None:
        self._blocks.add_request(request)
        self._intents.add(request)
        if self._placement.computes_no_prompt and (reason := why_refused(request)) is not None:
            request.skip_reading_prefix_cache = False  # with it, vLLM would compute the prompt whatever we answer
            self._refuse(request, reason, is_unfit=True)

    @owned
    def matched_tokens(self, request: ScheduledRequest, num_computed_tokens: int) -> int | None:
        """Returns how many of the request's tokens prefill will deliver. May be asked again: nothing counts before
        `allocated`.

        None: its adapter has not been read, or it has output in flight, or prefill computes it first, or it cannot be
        served, and ends (`take_refused`). A prompt that prefill computes first is posted with the next step.

        `num_computed_tokens`: how many of them this engine has in its prefix cache.
        """
        params, earlier = request.kv_transfer_params, self._transfers.get(request.request_id)
        if not self._blocks.is_ready(request) or request.request_id in self._refused:
            return None
        if self._requests.has_output_in_flight(request):
            return None
        no_prompt = self._placement.computes_no_prompt
        # Prefill has freed the prompt, because this engine was to compute it.
        is_freed = request.request_id in self._without_ticket
        gets_no_ticket = is_pulled(params) if no_prompt else not wants_ticket(params) or earlier is not None or is_freed
        if gets_no_ticket:
            self._placement.asked(request, num_computed_tokens, None)
            return 0
        lost = earlier is not None and earlier.failure is not None
        decision = self._placement.decide(request, num_computed_tokens, lost)
        if decision.reason is not Reason.CACHED:  # prefill may have computed it since that was decided
            decision = self._intents.decided(request.request_id) or decision
        self._placement.asked(request, num_computed_tokens, decision)
        if decision.by_decode:
            return 0
        if no_prompt and (reason := why_no_ticket(request, self._requests)) is not None:
            self._refuse(request, reason, is_unfit=not wants_ticket(params))
            return None
        if earlier is not None and (reason := earlier.why_not_again()) is not None:
            self._refuse(request, reason)
            return None
        if is_freed or (earlier is not None and names_prefill(params or {})):  # a held prompt takes one ticket
            self._refuse(request, (earlier and earlier.failure) or _FREED)
            return None
        tokens = max(0, self._issuer.num_tokens(request) - num_computed_tokens)
        may_wait = earlier is None and not names_prefill(params or {})  # and get its blocks later
        long = self._intents.of(request, tokens, decision) if may_wait else None
        if long is not None and long.failure is not None:
            self._placement.asked(request, num_computed_tokens, Decision(True, Reason.KV_LOST))
            return 0
        return tokens if long is None or long.ticket_recipient is not None else None

    @property
    def awaiting_prefill(self) -> set[str]:
        """Ids of requests that vLLM need not ask for now: prefill computes their prompts first."""
        return self._intents.awaiting_prefill

    @owned
    def allocated(self, request: ScheduledRequest, blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Issues a ticket for the request. `blocks`: its block ids, per cache group.

        Is called once more when the request starts to decode, after `update` has learned how the transfer ended. This
        second call only corrects what counts as cached.
        """
        self._blocks.allocated(request)
        earlier = self._transfers.get(request.request_id)
        if earlier is not None and (num_external_tokens == 0 or not earlier.ranks_ended):
            self._correct_cached_tokens(request, earlier)
            # A reset of the prefix cache takes the blocks of requests that were about to start, too.
            was_reset = earlier.ranks_ended and not request.num_computed_tokens
            if earlier.started or earlier.failure is not None or was_reset:
                again = Reason.KV_LOST if earlier.failure is not None and not earlier.started else Reason.PREEMPTED
                self._placement.allocated(request, True, None if self._placement.computes_no_prompt else again)
            elif earlier.ranks_ended and self._issuer.verifies(earlier.ticket):
                self._step.begun.append(earlier.ticket.ticket_id)
            earlier.started = True
            return
        if num_external_tokens == 0:
            self._placement.allocated(request, by_decode=True)
            self._no_ticket(request, "decode computes the prompt")
            return
        self._placement.allocated(request, by_decode=False)
        long = self._intents.take(request.request_id)
        transfer = self._open_transfer(request, blocks, num_external_tokens, earlier, long)
        params = request.kv_transfer_params or {}
        transfer.prefill_wait_s = prefill_wait_s(params)
        if long is not None:
            transfer.recipient, transfer.follows_intent = long.ticket_recipient, True
            transfer.computed_s = long.computed_at - long.posted_at
            self._to_send[transfer.ticket.ticket_id] = transfer
            return
        try:
            transfer.recipient = self._recipients.of(params)
        except NoRecipientError as error:
            self._fail(transfer, str(error), ReceiveFailure.NOT_POSTED)
            return
        if wants_token_ids(params):
            transfer.token_ids = self._requests.token_ids(request) or []
        self._to_send[transfer.ticket.ticket_id] = transfer

    def _open_transfer(
        self,
        request: ScheduledRequest,
        blocks: tuple[list[int], ...],
        num_external_tokens: int,
        earlier: _IncomingTransfer | None,
        long: LongPrompt | None = None,
    ) -> _IncomingTransfer:
        """Issues a ticket, tells the ranks of it, and returns its transfer. `earlier`: the request's one before.
        `long`: prefill has computed the prompt."""
        replaces = ""
        if earlier is not None:
            replaces = earlier.ticket.ticket_id
            del self._by_ticket[replaces]
        intent = None if long is None else long.intent
        ticket = self._issuer.issue(request, blocks, num_external_tokens, replaces, intent)
        transfer = _IncomingTransfer(request.request_id, ticket)
        if earlier is not None:
            transfer.received_before = earlier.all_received
            transfer.lost_before = earlier.lost_before + 1 if earlier.failure is not None else 0
            transfer.cached_tokens = earlier.cached_tokens  # since then, prefill has cached what it computed
        self._transfers[request.request_id] = self._by_ticket[ticket.ticket_id] = transfer
        expect = self._issuer.expect(request.request_id, ticket, blocks)
        self._step.expects.append(expect)
        first = None if long is None else (long.posted_at, long.computed_at)
        self._observer.on(TicketIssued(request.request_id, ticket, request.trace_headers, len(expect.blocks), first))
        return transfer

    @owned
    def build_step(self, scheduled: Mapping[str, int]) -> DecodeStep:
        """Returns the next step for the ranks. `scheduled`: how many tokens of which requests it computes.

        New tickets are sent only now. Sent earlier, prefill could ask ranks for a ticket that this step tells them of.
        """
        self._blocks.take_adapters()
        computes = bool(scheduled)
        self._placement.step_built(scheduled)
        self._post_intents()
        self._idle.pause(is_idle=not computes and self._step == DecodeStep())
        waits_here = self._take_answers() or bool(self._intents.awaiting_prefill)
        step, self._step = self._step, DecodeStep()
        step.wait_s = self._idle.next(computes, step != DecodeStep(), waits_here)
        step.wakeup_address = self._idle.wakeup_address
        step.weight_updates = self._blocks.weight_updates
        for transfer in self._to_send.values():
            assert transfer.recipient is not None
            transfer.recipient.send(transfer.ticket, transfer.token_ids)
            transfer.token_ids = []
        self._to_send.clear()
        return step

    def _take_answers(self) -> bool:
        """Takes what became of sent tickets: a prefill has ended, or failed. Returns whether vLLM has to ask for a
        request again."""
        asks_again = False
        for outcome in self._recipients.poll():
            if (long := self._intents.answered(outcome)) is not None:
                asks_again = True
                if long.failure is not None:
                    self._not_computed(long, ReceiveFailure.PREFILL)
            elif outcome.ok:
                self._step.prefilled.append(outcome.key)
            elif transfer := self._by_ticket.get(outcome.key):
                if transfer.follows_intent:  # the metaserver does not know: prefill has succeeded there
                    self._report_failure(transfer, outcome.reason, by_prefill=False)
                self._fail(transfer, outcome.reason, ReceiveFailure.PREFILL, outcome.may_follow)
        return asks_again

    def _post_intents(self) -> None:
        for request in self._intents.unasked():
            if self._blocks.is_ready(request) and request.request_id not in self._refused:
                cached = self._blocks.cached_tokens(request)
                decision = self._placement.decide(request, cached)
                tokens = 0 if decision.by_decode else self._issuer.num_tokens(request) - cached
                self._intents.of(request, tokens, decision)
        for long in self._intents.post():
            self._not_computed(long, ReceiveFailure.NOT_POSTED)

    def _not_computed(self, long: LongPrompt, cause: ReceiveFailure) -> None:
        """Prefill has not computed a long prompt, or does not hold it any more: this engine computes it, or it ends."""
        assert long.failure is not None
        self._observer.on(ReceiveFailed(cause))
        if not self._may_compute:
            self._end_with_error(long.request.request_id, long.failure)

    @owned
    def update(self, report: WorkerReport | None, ended: set[str]) -> None:
        if report is not None:
            self._blocks.weights_updated(report.weight_updates)
            self._take_failures(report)
            self._take_received(report)
            self._take_verified(report)
        for request_id in ended:
            transfer = self._transfers.get(request_id)
            # Another connector of a MultiConnector may load KV later, for a request that was preempted.
            if transfer is not None and not transfer.ranks_ended:
                self._ranks_ended(transfer)

    def _take_failures(self, report: WorkerReport) -> None:
        for ticket_id, reason in report.failed.items():
            if transfer := self._by_ticket.get(ticket_id):
                self._report_failure(transfer, reason, ticket_id in report.by_prefill)
                # If one rank has failed, the others need not wait any longer.
                cause = ReceiveFailure.WRONG_BYTES if ticket_id in report.wrong else ReceiveFailure.TRANSFER
                self._fail(transfer, reason, cause, may_follow=True)

    def _take_verified(self, report: WorkerReport) -> None:
        """Counts comparisons, and ends requests whose KV was overwritten.

        These end whatever the policy: vLLM may have their next steps under way.
        """
        for result, count in report.verified.items():
            self._observer.on(KvVerified(result, count))
        for request_id, (reason, blocks) in report.overwritten.items():
            self._observer.on(ReceiveFailed(ReceiveFailure.OVERWRITTEN))
            self._blocks.evict(blocks)
            self._to_end.append(request_id)
            if transfer := self._transfers.get(request_id):  # otherwise that step has ended it
                self._report_failure(transfer, reason, by_prefill=True)
                self._refused[request_id] = reason

    def _take_received(self, report: WorkerReport) -> None:
        for ticket_id, tokens in report.cached.items():
            if transfer := self._by_ticket.get(ticket_id):
                known = transfer.cached_tokens
                transfer.cached_tokens = tokens if known is None else min(known, tokens)
        for ticket_id, (num_bytes, before_end) in report.received.items():
            if transfer := self._by_ticket.get(ticket_id):
                got = transfer.received
                transfer.received = (got[0] + num_bytes, got[1] + before_end)

    def _ranks_ended(self, transfer: _IncomingTransfer) -> None:
        """All ranks have reported that nobody can write for the transfer's ticket any more."""
        transfer.ranks_ended = True
        self._failed_waits.pop(transfer.request_id, None)
        if transfer.recipient is not None and transfer.failure is None:
            transfer.recipient.end(transfer.ticket, None)
        lasted_s = time.monotonic() - transfer.issued_at
        if transfer.failure is None:
            tokens = transfer.ticket.num_tokens - transfer.ticket.remote_cached_tokens
            self._placement.delivered(tokens, lasted_s + transfer.computed_s, transfer.prefill_wait_s)
        num_bytes, early_bytes = transfer.received
        how = transfer.cause, transfer.failure or ""
        self._observer.on(ReceiveEnded(transfer.request_id, transfer.ticket, lasted_s, num_bytes, early_bytes, *how))
        self._forget_if_over(transfer)

    @owned
    def end_request(self, request: ScheduledRequest) -> tuple[bool, dict[str, Any] | None]:
        return False, self._request_ended(request)

    def _request_ended(self, request: ScheduledRequest) -> dict[str, Any] | None:
        """vLLM has ended the request. Returns what its response says about its transfer."""
        self._placement.forget(request.request_id)
        self._intents_end(request, _ABORTED)
        transfer = self._transfers.get(request.request_id)
        refused = self._refused.pop(request.request_id, None)
        if transfer is None:
            self._no_ticket(request, _ABORTED)  # unless this engine has computed its prompt
            self._without_ticket.discard(request.request_id)
            return None if refused is None else {"error": refused}
        transfer.request_ended = True
        self._failed_waits.pop(request.request_id, None)
        if not transfer.ranks_ended:
            if self._requests.ended_in_error(request):
                # vLLM ends a request whose KV is lost before it hands over the ranks' report, which says why. `update`
                # gets that report next.
                return {"error": transfer.failure or "its KV was lost"}
            self._fail(transfer, _ABORTED, ReceiveFailure.ABORTED)
        self._forget_if_over(transfer)
        if (failure := refused or transfer.failure) is not None:
            return {"error": failure}
        num_bytes, early_bytes = transfer.all_received
        return {"received_bytes": num_bytes, "bytes_before_prefill_end": early_bytes}

    @owned
    def steps_lost(self) -> None:
        """Cancels all tickets, and has each rank report their ends anew. A rank that has not heard of a ticket reports
        it as ended at once: it has granted nothing for it."""
        self._blocks.drop_cached()  # vLLM keeps blocks that the lost steps were to compute
        under_way = [transfer for transfer in self._transfers.values() if not transfer.ranks_ended]
        for transfer in under_way:
            self._fail(transfer, _STEP_LOST, ReceiveFailure.ABORTED)
            self._step.cancelled[transfer.ticket.ticket_id] = transfer.failure or _STEP_LOST
        self._step.report_again = {transfer.request_id for transfer in under_way}

    @owned
    def take_refused(self) -> list[str]:
        """Returns ids of requests that vLLM has to end with an error, each once. Some may have ended meanwhile.

        vLLM asks after each step.
        """
        self._end_failed_waits()
        for long in self._intents.overdue():
            assert long.failure is not None
            self._observer.on(ReceiveFailed(ReceiveFailure.TRANSFER))
            self._end_with_error(long.request.request_id, long.failure)
        to_end, self._to_end = self._to_end, []
        return to_end

    def _end_failed_waits(self) -> None:
        """Ends requests whose failed transfers do not end: a prefill process is stopped. vLLM would wait as long."""
        now = time.monotonic()
        while self._failed_waits and next(iter(self._failed_waits.values())) <= now:
            request_id = next(iter(self._failed_waits))
            del self._failed_waits[request_id]
            failure = self._transfers[request_id].failure
            assert failure is not None
            logger.warning("request %s ends: %s; its blocks are kept until prefill has stopped", request_id, failure)
            self._refused[request_id] = failure
            self._to_end.append(request_id)

    def _end_with_error(self, request_id: str, reason: str) -> None:
        logger.warning("request %s ends: %s", request_id, reason)
        self._refused[request_id] = reason
        self._to_end.append(request_id)

    def _refuse(self, request: ScheduledRequest, reason: str, is_unfit: bool = False) -> None:
        """Ends the request with an error: its tokens cannot be had from prefill, and decode must not compute them.

        vLLM tells the client of no reason, so the proxy does. `is_unfit`: whether other decode engines would refuse the
        request, too.
        """
        self._end_with_error(request.request_id, reason)
        params = request.kv_transfer_params
        if wants_ticket(params):
            failure = TransferFailure(self._requests.external_id(request), "", reason[:MAX_FAILURE_CHARS], is_unfit)
            with suppress(NoRecipientError):  # nobody that this engine may talk to
                self._recipients.of(params).report_failure(failure)

    @owned
    def started(self) -> None:
        """This engine's ranks have started."""
        self._observer.on(ThresholdSet(self._placement.threshold()))

    @owned
    def renamed(self, engine_id: str) -> None:
        """Later tickets name this engine `engine_id`."""
        self._issuer.renamed(engine_id)

    def close(self) -> None:
        """Closes what the scheduler was given to close. Waits 2 s at most for the observer."""
        with ExitStack() as closing:  # all of them, even if one raises
            closing.callback(self._observer.close, _CLOSE_OBSERVER_S)
            closing.callback(self._idle.close)
            closing.callback(self._recipients.close)

    def _intents_end(self, request: ScheduledRequest, reason: str) -> None:
        if (long := self._intents.take(request.request_id)) is not None:
            long.end(reason)

    def _no_ticket(self, request: ScheduledRequest, reason: str) -> None:
        """If a prefill engine holds the request's prompt for a ticket, or computes it, tells it once that none will
        come."""
        self._intents_end(request, reason)
        params = request.kv_transfer_params
        if not wants_ticket(params) or not names_prefill(params) or request.request_id in self._without_ticket:
            return
        self._without_ticket.add(request.request_id)
        self._recipients.no_ticket(params, self._issuer.name(request), reason)

    def _report_failure(self, transfer: _IncomingTransfer, reason: str, by_prefill: bool) -> None:
        """Passes on what a rank noticed. The proxy makes a new request, or tells the client why there is no answer.

        `by_prefill`: as in TransferFailure.
        """
        if transfer.recipient is None or transfer.failure is not None:
            return
        ticket, reason = transfer.ticket, reason[:MAX_FAILURE_CHARS]
        transfer.recipient.report_failure(
            TransferFailure(ticket.request_id, ticket.ticket_id, reason, by_prefill=by_prefill)
        )

    def _fail(self, transfer: _IncomingTransfer, reason: str, cause: ReceiveFailure, may_follow: bool = False) -> None:
        """Gives the transfer up, unless it has ended or failed already: the next step cancels it on all ranks."""
        if transfer.ranks_ended or transfer.failure is not None:
            return
        transfer.failure, transfer.cause, transfer.may_follow = reason, cause, may_follow
        if not transfer.request_ended:
            self._failed_waits[transfer.request_id] = time.monotonic() + self._failed_wait_s
        self._observer.on(ReceiveFailed(cause))
        ticket_id = transfer.ticket.ticket_id
        self._to_send.pop(ticket_id, None)
        if transfer.recipient is not None:
            transfer.recipient.end(transfer.ticket, reason)
        self._step.cancelled[ticket_id] = reason

    def _correct_cached_tokens(self, request: ScheduledRequest, transfer: _IncomingTransfer) -> None:
        """Sets which tokens the request's usage reports as cached."""
        if not transfer.ranks_ended:
            return
        if transfer.failure is None:
            self._requests.set_cached_tokens(request, transfer.cached_tokens or 0)
        else:
            self._requests.keep_own_cached_tokens(request)

    def _forget_if_over(self, transfer: _IncomingTransfer) -> None:
        if transfer.request_ended and transfer.ranks_ended:
            del self._transfers[transfer.request_id]
            del self._by_ticket[transfer.ticket.ticket_id]
