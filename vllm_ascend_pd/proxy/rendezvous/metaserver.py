# SPDX-License-Identifier: Apache-2.0
"""The metaserver: a decode engine posts a ticket (which blocks wait for KV, and where), and gets its answer
once a prefill engine has run the prompt, or none could. What decode notices of a transfer it says here too."""

from __future__ import annotations

import logging
import time
from http import HTTPStatus

import anyio
import anyio.lowlevel
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_ascend_pd.core.metaserver import MAX_REASON_CHARS, RECOMPUTES_HEADER, TransferFailure
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.bodies import prefill_body, samples_of, tokens_body
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.errors import error_response
from vllm_ascend_pd.proxy.http.streams import TooLarge, read_all, when_disconnected
from vllm_ascend_pd.proxy.rendezvous.observer import ATTEMPT, PROMPT, REQUEST_ID, Attributes, Observer, Span
from vllm_ascend_pd.proxy.rendezvous.open_tickets import OpenTickets
from vllm_ascend_pd.proxy.rendezvous.post_reader import PostReader, PostRefused, error_answer
from vllm_ascend_pd.proxy.rendezvous.prefill_answer import bad_gateway, failed, judge
from vllm_ascend_pd.proxy.rendezvous.proxied_request import DecodeAttempt, RequestTable, TicketProgress, Waiting
from vllm_ascend_pd.proxy.rendezvous.retry import (
    FINAL,
    PREFILL_AGAIN,
    PREFILL_AGAIN_ANEW,
    PREFILL_MAY_WRITE,
    Failure,
    engines_to_avoid,
    summary,
    without,
)
from vllm_ascend_pd.proxy.rendezvous.tickets import NotRepeatableError, ParsedTicket, Sign, read_ticket
from vllm_ascend_pd.proxy.routing.engine_call import EngineCall
from vllm_ascend_pd.proxy.routing.engine_pool import EngineError, EnginePool, EngineRequest
from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind
from vllm_ascend_pd.proxy.routing.prompts import prompt_of
from vllm_ascend_pd.proxy.routing.ranking import EngineRanking
from vllm_ascend_pd.proxy.routing.registry import EngineRole
from vllm_ascend_pd.proxy.routing.stall_watch import StallWatch
from vllm_ascend_pd.proxy.settings import MIB, ProxySettings

log = logging.getLogger(__name__)

# P answers with one token; more than this is no completion.
_MAX_PREFILL_ANSWER_BYTES = 8 * MIB
_MAX_FAILURE_BYTES = 64 * 1024


class Metaserver:
    def __init__(
        self,
        settings: ProxySettings,
        request_table: RequestTable,
        prefill: EnginePool,
        observer: Observer,
        sign: Sign | None = None,
    ) -> None:
        """`sign`: for other attempts of signed tickets."""
        self._settings = settings
        self._request_table = request_table
        self._prefill = prefill
        self._observer = observer
        self._sign = sign
        self._inbox = PostReader(settings, request_table)
        self.open_tickets = OpenTickets(self._inbox)
        self.watch = StallWatch(
            prefill,
            probe_timeout=settings.probe_timeout,
            stall_timeout=settings.read_timeout,
            idle_timeout=settings.prefill_timeout,
        )

    async def post_ticket(self, request: Request) -> Response:
        """200 once P has run the prompt; 400 for what is no ticket; 401 without the token; 404 when no request waits
        for it; 409 when that has its tickets already; 410 when it ended meanwhile; 502 when the prefill failed; 503
        when the proxy shuts down. Errors are `{"error": reason}`."""
        try:
            posted = await self._inbox.read(request, self._settings.max_ticket_bytes, read_ticket, "ticket")
            ticket = posted.ticket
            waiting = self._find(ticket.request_id)
        except PostRefused as refused:
            return refused.answer
        attempt, index = waiting.attempt, waiting.prompt
        if not ticket.ticket_id and (index or waiting.is_sample):
            return _refuse_unmatched(attempt)
        failed_before, samples = waiting.proxied.prefill_failures(index), samples_of(waiting.request)
        state = attempt.ticket(index, ticket.ticket_id, ticket.attempt, failed_before, samples)
        if state is None:
            return error_answer(HTTPStatus.CONFLICT, "this request_id has its tickets already, of other ids")
        state.recomputes = request.headers.get(RECOMPUTES_HEADER) == "1"

        failures: list[Failure] = []
        with attempt.prefill() as scope, self._observer.ticket_waits(), self.open_tickets.held(ticket.ticket_id):
            state.post = scope

            def decode_left() -> None:
                log.warning(
                    "request %s, prompt %d: decode engine %s gave its ticket up: cancelling the prefill",
                    attempt.request_id,
                    index,
                    ticket.remote_engine_id,
                )
                state.left = True
                scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(when_disconnected, request.receive, decode_left)
                failures = await self._serve(waiting, posted, state)
                tasks.cancel_scope.cancel()
        if scope.cancelled_caught or attempt.over:
            return error_answer(HTTPStatus.GONE, "the client's request has ended, or was made anew")
        if not failures:
            state.answered = True
            attempt.prefilled_at = attempt.prefilled_at or time.monotonic()
            return JSONResponse({"status": "ok"})
        reason = summary(failures)
        goes_on = attempt.answering or state.recomputes
        log.warning(
            "request %s, prompt %d, decode engine %s: prefill failed: %s: the decode engine is told%s",
            attempt.request_id,
            index,
            ticket.remote_engine_id,
            reason,
            " and goes on or ends its own answer" if goes_on else "",
        )
        answer, kind = bad_gateway(f"prefill failed: {reason}"), FailureKind.PREFILL
        if failures[-1].kind in FINAL:
            answer, kind = failures[-1].answer, failures[-1].kind
        elif failures[-1].kind is FailureKind.NO_ENGINE:
            answer = failures[-1].answer
        unquoted = "; ".join(failure.for_all for failure in failures)
        attempt.note_transfer_failure(Failure(kind, reason, attempt.engine, answer, unquoted))
        if not goes_on:
            attempt.end()
        return error_answer(HTTPStatus.BAD_GATEWAY, reason)

    async def post_failure(self, request: Request) -> Response:
        """Decode says that an attempt of a ticket failed: the prefill engine that serves it is let go, and another
        asked, under a new request if that is still possible. 200, also for an attempt that is over; 400 and 404 as for
        a ticket."""
        try:
            noticed = await self._inbox.read(request, _MAX_FAILURE_BYTES, _read_failure, "failure")
            proxied, attempt, _, index, _ = self._find(noticed.request_id)
        except PostRefused as refused:
            return refused.answer
        state = attempt.tickets.get((index, noticed.ticket_id))
        if state is None:
            return error_answer(HTTPStatus.NOT_FOUND, "no such ticket was posted for this request_id")
        if not noticed.final and noticed.attempt != state.attempt:
            return JSONResponse({"status": "over"})
        reason = one_line(noticed.reason, MAX_REASON_CHARS)
        run = state.run
        under_way = run in self.watch
        # This failure is not among the ticket's yet.
        anew = under_way and attempt.may_begin_anew and len(state.failures) + 1 < self._settings.prefill_attempts
        ends_attempt = False
        # Once decode has its answer there is no other attempt under this ticket.
        if noticed.final or state.answered or anew:
            if run.engines and not state.given_up:
                proxied.prefill_failed(state, failed(FailureKind.TRANSFER, reason, run.engine))
            state.given_up = True
            attempt.note_transfer_failure(_not_transferred(reason, attempt, self._used_up(state)))
            ends_attempt = anew or not (attempt.answering or state.recomputes)
            if ends_attempt:
                proxied.begin_anew(attempt, index, state)
        if under_way:
            run.cut_short(FailureKind.TRANSFER, f"decode noticed: {reason}")
        elif not ends_attempt:  # else whoever goes on from there logs it
            log.warning(
                "request %s, prompt %d: a transfer failed, says decode engine %s, which goes on without: %s",
                attempt.request_id,
                index,
                attempt.engine,
                reason,
            )
        return JSONResponse({"status": "ok"})

    def _find(self, engine_request_id: str) -> Waiting:
        try:
            return self._request_table.find(engine_request_id)
        except LookupError:
            raise PostRefused(HTTPStatus.NOT_FOUND, "no request waits under this request_id") from None

    async def _serve(self, waiting: Waiting, posted: ParsedTicket, state: TicketProgress) -> list[Failure]:
        """Has one prefill engine after the other run the prompt. Returns why all failed, those asked under an earlier
        request included, or nothing."""
        proxied, attempt, request, index, _ = waiting
        pool = self._prefill
        prompt = prompt_of(request, index)
        failures = state.failures
        if self._used_up(state):
            return failures

        def all_but(avoid: frozenset[str]) -> EngineRanking:
            return pool.ranker.rank(prompt, without(pool.urls, avoid, proxied.failed_prefill), proxied.prefills)

        choice = all_but(frozenset())
        if state.attempt != posted.ticket.attempt:  # posted again
            try:
                posted = posted.of_attempt(state.attempt, self._sign)
            except NotRepeatableError as error:
                return [failed(FailureKind.TRANSFER, f"the ticket was posted again: {error}", "")]
        while True:
            failure = await self._run(waiting, state, choice, posted)
            pool.judge(state.run.engine, failure and failure.kind)
            if failure is None:
                return []
            self._observer.attempt_failed(EngineRole.PREFILL, failure, attempt.request_id)
            if state.given_up:  # and its failure noted, where an engine had been asked
                return failures or [failure]
            proxied.prefill_failed(state, failure)
            # A task that is cancelled when it is about to go on anyway goes on.
            if attempt.over:
                proxied.inherit(index, state)
                return failures
            await anyio.lowlevel.checkpoint_if_cancelled()  # the ticket was posted again
            again = PREFILL_AGAIN_ANEW if attempt.may_begin_anew else PREFILL_AGAIN
            avoid = engines_to_avoid(pool.urls, failures, self._settings.prefill_attempts, again)
            if avoid is None:
                return failures
            if attempt.may_begin_anew and failure.kind in PREFILL_MAY_WRITE:
                attempt.note_transfer_failure(_not_prefilled(failure, attempt))
                proxied.begin_anew(attempt, index, state)
                return failures
            try:
                posted = posted.of_attempt(state.attempt + 1, self._sign)
            except NotRepeatableError as error:
                return [*failures[:-1], failure._replace(reason=f"{failure.reason} (no other attempt: {error})")]
            state.attempt += 1
            choice = all_but(avoid)
            self._observer.attempt_retried(EngineRole.PREFILL)
            attempt.span.retried(failure, choice.first)
            log.warning(
                "request %s, prompt %d: prefill at %s failed: %s: attempt %d goes to %s",
                attempt.request_id,
                index,
                failure.url,
                failure.reason,
                state.attempt,
                choice.first,
            )

    def _used_up(self, state: TicketProgress) -> bool:
        """Whether all prefills of a ticket's prompt have failed that there may be."""
        return len(state.failures) >= self._settings.prefill_attempts

    async def _run(
        self, waiting: Waiting, state: TicketProgress, choice: EngineRanking, posted: ParsedTicket
    ) -> Failure | None:
        """One attempt. Decode may cut it short."""
        failure: Failure | None = None
        run = state.run = EngineCall()
        begun = time.monotonic()
        about: Attributes = {REQUEST_ID: waiting.attempt.request_id, PROMPT: waiting.prompt, ATTEMPT: state.attempt}
        with waiting.attempt.span.child("prefill", about) as span:
            try:
                with self.watch.over(run), run.scope:
                    failure = await self._ask(waiting, choice, posted, run, span)
            finally:
                span.asked(run.engines)
            if run.cut is not None:
                failure = failed(*run.cut, run.engine)
            if failure is not None:
                span.failed(failure)
        if failure is None:
            self._observer.prefilled(time.monotonic() - begun)
        return failure

    async def _ask(
        self, waiting: Waiting, choice: EngineRanking, posted: ParsedTicket, run: EngineCall, span: Span
    ) -> Failure | None:
        _, attempt, request, index, _ = waiting
        if posted.token_ids is None:
            path, body = request.endpoint.value, prefill_body(request, index, posted.encoded, attempt.request_id)
        else:
            path, body = Endpoint.COMPLETIONS.value, tokens_body(request, posted.token_ids, posted.encoded)
        try:
            sent = EngineRequest("POST", path, span.onto(attempt.prefill_headers), body, attempt.request_id)
            async with self._prefill.open(choice, sent, run) as answer:
                said = await read_all(answer.chunks(), _MAX_PREFILL_ANSWER_BYTES)
        except EngineError as error:
            refusal = error_response(error.status, f"prefill failed: {error}")
            return Failure(error.kind, str(error), error.url, refusal)
        except TooLarge:
            reason = f"the prefill engine's answer exceeds {_MAX_PREFILL_ANSWER_BYTES} bytes"
            return failed(FailureKind.GARBAGE, reason, run.engine)
        return judge(answer.status, answer.header("Content-Type"), said, run.engine)


def _read_failure(body: bytes) -> TransferFailure:
    return msgspec.json.decode(body, type=TransferFailure)


def _refuse_unmatched(attempt: DecodeAttempt) -> Response:
    """vllm-ascend's connector finds the request that KV is for by its id on P. P always has the id of one prompt and
    one sample: decode would wait for all others for ever."""
    reason = "the decode engines' connector takes one prompt and one sample (n) per request: send them one by one"
    log.warning("request %s: %s", attempt.request_id, reason)
    answer = error_response(HTTPStatus.BAD_REQUEST, reason)
    attempt.note_transfer_failure(Failure(FailureKind.REFUSED, reason, attempt.engine, answer))
    attempt.end()
    return error_answer(HTTPStatus.BAD_REQUEST, reason)


def _not_transferred(reason: str, attempt: DecodeAttempt, last: bool) -> Failure:
    """`last`: no other attempt may follow, at decode either."""
    kind = FailureKind.PREFILL if last else FailureKind.TRANSFER
    return Failure(kind, reason, attempt.engine, bad_gateway(f"KV transfer failed: {reason}"))


def _not_prefilled(failure: Failure, attempt: DecodeAttempt) -> Failure:
    """What it means for the attempt at decode. Clients do not learn engines' addresses."""
    before = f"prefill at {failure.url} failed: "
    unquoted = before + failure.for_all
    return Failure(FailureKind.TRANSFER, before + failure.reason, attempt.engine, failure.answer, unquoted)
