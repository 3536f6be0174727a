# SPDX-License-Identifier: Apache-2.0
"""The metaserver: decode engines post tickets, failures, and questions about open tickets.

A ticket is answered when its prefill has ended. The client request that it is for waits at the decode engine meanwhile.
That says nothing about the transfer, whose result `Deliveries` records when it is over.
A ticket has one prefill engine: others are asked only as long as none may have begun with it (`EnginePool.open`). If it
fails, a new decode request follows, with a ticket of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from http import HTTPStatus

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from vllm_ascend_pd.core.protocol import (
    FAILURE_SUFFIX,
    MAX_FAILURE_CHARS,
    METASERVER_PATH,
    RECOMPUTES_HEADER,
    WAITING_SUFFIX,
    TransferFailure,
    WaitingAnswer,
    WaitingQuestion,
)
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.bodies import prefill_body, tokens_body
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.messages import (
    RequestRefused,
    TooLarge,
    beside,
    disconnected,
    error_response,
    guarded,
    prefill_request_headers,
)
from vllm_ascend_pd.proxy.rendezvous.deliveries import Deliveries
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import Prefill, ProxiedRequest, RequestTable
from vllm_ascend_pd.proxy.rendezvous.tickets import (
    ParsedTicket,
    TicketHeader,
    answer_to_intent,
    failed,
    failure_of,
    read_ticket,
)
from vllm_ascend_pd.proxy.routing.answers import (
    RULES,
    EngineRole,
    Failure,
    FailureKind,
    Then,
    lacks_prefill,
    last_resorts,
    summary,
)
from vllm_ascend_pd.proxy.routing.dispatch import EngineError, EnginePool
from vllm_ascend_pd.proxy.routing.engines import EngineRanking
from vllm_ascend_pd.proxy.routing.strategies import PromptEstimate, prompt_of
from vllm_ascend_pd.proxy.settings import ProxySettings

log = logging.getLogger(__name__)

_REJOIN_SECONDS = 5.0
"""After it has lost its connection, decode posts a ticket again within 3 s (`metaserver_retries`)."""
_MAX_FAILURE_BYTES = 64 * 1024
_MAX_QUESTION_BYTES = 128 * 1024
"""`MAX_ASKED` ids of 64 characters each, and the JSON around them."""
_MAX_PREFILL_ANSWER_BYTES = 8 * 1024 * 1024
"""A prefill engine answers with one token. A longer answer is no completion."""

_PREFILLED = JSONResponse({"status": "ok"})
"""The answer to all tickets whose prefill succeeded: one object, because requests keep those of all their tickets."""

_NO_KV = Failure(FailureKind.TRANSFER, "", "", _PREFILLED)
"""Of an attempt at decode whose engine is not at fault."""

_read_failure = msgspec.json.Decoder(TransferFailure).decode
_read_question = msgspec.json.Decoder(WaitingQuestion).decode


class Metaserver:
    """Serves the decode engines' posts. The event loop's thread owns it."""

    def __init__(
        self,
        request_table: RequestTable,
        prefill: EnginePool,
        decode: EnginePool,
        deliveries: Deliveries,
        observer: ProxyObserver,
        settings: ProxySettings,
    ) -> None:
        """`request_table`: the client requests that tickets are matched with."""
        self._request_table = request_table
        self._prefill_pool = prefill
        self._decode_pool = decode
        self._deliveries = deliveries
        self._observer = observer
        self._tokens = settings.metaserver_tokens()
        """Of decode engines; none if they need none."""
        self._max_ticket_bytes = settings.max_ticket_bytes
        self._open: set[str] = set()
        """Ids of tickets that wait in a queue or are prefilled. `StallWatch` ends prefills at engines that stopped."""

    def routes(self) -> list[BaseRoute]:
        """A post that cannot be used is answered 400 or 413 (it cannot be read), 401 (the token is missing), 404 (no
        request waits for it), 408 (its body did not arrive in time) or 503 (there is no room for its body, or the proxy
        shuts down). The body of errors is `{"error": reason}`, but for 408, which has the form of OpenAI's errors."""
        posts = {"": self.post_ticket, FAILURE_SUFFIX: self.post_failure, WAITING_SUFFIX: self.post_question}
        name = "bearer token (of the cluster's secret, or metaserver_token_file)"
        return [
            Route(
                METASERVER_PATH + suffix,
                guarded(self._tokens, name, action) if self._tokens else action,
                methods=["POST"],
            )
            for suffix, action in posts.items()
        ]

    # Tickets.

    async def post_ticket(self, request: Request) -> Response:
        """Answers a posted ticket.

        200: a prefill engine has computed the prompt. 400: the ticket has no id, and the request several prompts or
        samples. 409: the request has all its tickets already. 410: the request has ended meanwhile. 502: the prefill
        failed; `may_follow` in the body says whether one under another ticket may succeed.
        """
        ticket = await self._request_table.read(request, self._max_ticket_bytes, read_ticket, "ticket")
        prefill = self._register(ticket.header)
        prefill.recomputes = request.headers.get(RECOMPUTES_HEADER) == "1"
        prefill.posts += 1
        with beside(_end_when_left(request, prefill)):
            if prefill.is_started:  # decode lost its connection, and posts the ticket again
                await prefill.wait()
            else:
                await self._prefill(ticket, prefill)
        if prefill.answer is None or prefill.is_over:
            raise RequestRefused(HTTPStatus.GONE, "the client's request has ended or was retried")
        return prefill.answer

    def _register(self, ticket: TicketHeader) -> Prefill:
        """Registers a ticket with its request. Raises RequestRefused."""
        request, parsed, prompt, is_sample = self._request_table.find(ticket.request_id)
        if not ticket.ticket_id and (prompt or is_sample):
            raise _unmatched(request)
        is_authentic = bool(self._tokens)
        prefill = request.prefill_for(prompt, ticket.ticket_id, parsed.samples, ticket.replaces, is_authentic)
        if prefill is None:
            raise RequestRefused(
                HTTPStatus.CONFLICT, "this request_id has all its tickets already, under other ticket ids"
            )
        return prefill

    async def _prefill(self, ticket: ParsedTicket, prefill: Prefill) -> None:
        """Has a prefill engine compute the ticket's prompt, unless that has failed too often. Sets the answer for
        decode."""
        request, failures = prefill.request, prefill.failures
        used_up = bool(failures) and self._prefill_pool.are_used_up(failures)
        self._open.add(ticket.header.ticket_id)
        try:
            with prefill.running(), self._observer.tickets_waiting.track_inprogress():
                result = None if used_up else await self._ask(ticket, prefill)
        finally:
            self._open.discard(ticket.header.ticket_id)
        failure = result if isinstance(result, Failure) else None
        if failure is not None:
            self._deliveries.prefill_failed(prefill, failure)
            if not prefill.given_up:  # otherwise decode has reported it
                prefill.failed(failure)
        if prefill.is_over:
            return
        if isinstance(result, Response):
            prefill.answered, prefill.answer = True, result
            request.prefilled_at = request.prefilled_at or time.monotonic()
            return
        may_follow = self._prefill_pool.to_avoid(failures) is not None
        if failure is not None and not prefill.given_up and may_follow and self._may_begin_anew(request):
            # Only the log gets the prefill engine's address.
            before = f"prefill at {failure.url} failed: "
            reason, unquoted = before + failure.reason, before + failure.for_all
            request.note_transfer_failure(
                Failure(FailureKind.TRANSFER, reason, request.engine, failure.answer, unquoted)
            )
            request.give_up()
        reasons = failures if failures or failure is None else [failure]
        prefill.answer = _prefill_failed(ticket.header, prefill, reasons, may_follow)

    async def _ask(self, ticket: ParsedTicket, prefill: Prefill) -> Response | Failure | None:
        """Has one engine compute the prompt: others are asked only while none has begun. The stall watch, or a report
        from decode, may end it early. Returns the answer for decode, or how it failed; None if nobody waits for it any
        more."""
        request, base = prefill.request, ticket.header.is_for_base_model
        parsed = request.parsed
        assert parsed is not None
        if ticket.token_ids is None:
            path = parsed.endpoint.value
            body = prefill_body(parsed, prefill.prompt, ticket.encoded, prefill.request_id, base)
        else:
            path, body = Endpoint.COMPLETIONS.value, tokens_body(parsed, ticket.token_ids, ticket.encoded, base)
        headers = prefill_request_headers(request.decode_headers)
        ranking = self._rank(prefill, prompt_of(parsed, prefill.prompt))
        # Prefill may let an intent wait for room that is free again when others' tickets have been served.
        prefill.gives_way = ticket.header.ticket_follows
        result: Response | Failure | None = None
        with self._prefill_pool.watch.over(prefill):
            try:
                async with self._prefill_pool.open(prefill, ranking, "POST", path, headers, body) as response:
                    answer = await response.buffer(_MAX_PREFILL_ANSWER_BYTES)
                result = failure_of(response.status, response.content_type, answer, prefill.engine)
                if result is None:
                    result = answer_to_intent(answer) if ticket.header.ticket_follows else _PREFILLED
            except EngineError as error:
                for_client = error_response(error.status, f"prefill failed: {error}")
                result = Failure(error.kind, str(error), error.url, for_client)
            except TooLarge:
                reason = f"the prefill engine's answer exceeds {_MAX_PREFILL_ANSWER_BYTES} bytes"
                result = failed(FailureKind.GARBAGE, reason, prefill.engine)
        if prefill.cut is not None:
            return failed(*prefill.cut, prefill.engine)
        if isinstance(result, Response) and not prefill.is_over:
            seconds = time.monotonic() - prefill.silent_since
            self._observer.prefill_seconds.observe(seconds)
            self._prefill_pool.pace.note(prefill.work, seconds)
        return result

    def _rank(self, prefill: Prefill, prompt: PromptEstimate) -> EngineRanking:
        """Ranks the engines for a prompt: those that have failed for its request come last, if at all."""
        engines, avoid = self._prefill_pool.engines, frozenset(prefill.request.failed_prefill_urls)
        doubted = self._deliveries.passed_over([prefill.decode_engine])
        if not avoid or not set(engines.urls) - avoid:
            return engines.rank(prompt, doubted=doubted)
        # Where decode computes the prompt at last, an engine that may have died of it is not asked twice.
        rules = [(failure, RULES[EngineRole.PREFILL, failure.kind]) for failure in prefill.failures]
        accidents = [failure for failure, rule in rules if rule.then is Then.ANEW or rule.outlived]
        return engines.rank(prompt, avoid, doubted, last=last_resorts(EngineRole.PREFILL, accidents, avoid))

    def _may_begin_anew(self, request: ProxiedRequest) -> bool:
        """Whether another attempt at decode may replace the one in flight, which has failed through no fault of its own
        engine: it is allowed, and the client has got nothing yet."""
        return not request.reply.started and self._decode_pool.to_avoid([*request.failures, _NO_KV]) is not None

    # Failures.

    async def post_failure(self, request: Request) -> Response:
        """A decode engine reports that a ticket's KV did not come, or will not. Answers 200.

        Ends the ticket's prefill. If the client has got nothing yet, a new decode attempt may follow. A failure without
        a ticket's id is the whole request's: it gets no ticket, or no further one.
        """
        report = await self._request_table.read(request, _MAX_FAILURE_BYTES, _read_failure, "failure")
        failing, _, prompt, _ = self._request_table.find(report.request_id)
        reason = one_line(report.reason, MAX_FAILURE_CHARS)
        if report.ticket_id:
            prefill = failing.prefills.get((prompt, report.ticket_id))
            if prefill is None:
                raise RequestRefused(HTTPStatus.NOT_FOUND, "no such ticket was posted for this request_id")
            self._transfer_failed(prefill, reason, report.by_prefill)
        else:
            _gets_no_ticket(failing, reason, report.is_unfit)
        return JSONResponse({"status": "ok"})

    def _transfer_failed(self, prefill: Prefill, reason: str, by_prefill: bool) -> None:
        request = prefill.request
        in_flight = prefill in self._prefill_pool.watch
        kind = FailureKind.TRANSFER if by_prefill or not in_flight else FailureKind.INTERRUPTED
        has_failed = prefill.answer is not None and not prefill.answered
        if prefill.engine and not (prefill.given_up or has_failed):
            failure = failed(kind, reason, prefill.engine)
            prefill.failed(failure)
            self._deliveries.prefill_failed(prefill, failure)
        prefill.given_up = True
        failures, used_up = prefill.failures, self._prefill_pool.are_used_up(prefill.failures)
        failure = _transfer_failure(reason, request)
        if used_up:
            failure = _without_kv(request, failures, failure._replace(kind=FailureKind.PREFILL))
        request.note_transfer_failure(failure, prefill)
        begin_anew = in_flight and not used_up and self._may_begin_anew(request)
        attempt_ends = begin_anew or not (request.reply.started or prefill.recomputes)
        if attempt_ends:
            request.give_up()
        if in_flight:
            prefill.cut_short(kind, f"decode reported: {reason}")
        elif not attempt_ends:  # otherwise the next attempt logs it
            log.warning(
                "request %s, prompt %d: decode engine %s reports a failed transfer and continues without it: %s",
                *(request.request_id, prefill.prompt, request.engine, reason),
            )

    # Questions.

    async def post_question(self, request: Request) -> Response:
        """Tells a decode engine which of its tickets still wait for prefill, so that their timeouts exclude that time.

        Only engines that have a ticket know its id, so an engine learns nothing about other tickets.
        """
        question = await self._request_table.read(request, _MAX_QUESTION_BYTES, _read_question, "question")
        waiting = [ticket_id for ticket_id in question.ticket_ids if ticket_id in self._open]
        return Response(msgspec.json.encode(WaitingAnswer(waiting)), media_type="application/json")


async def _end_when_left(request: Request, prefill: Prefill) -> None:
    """Ends the prefill if the decode engine closes the connection and does not post the ticket again."""
    await disconnected(request.receive)
    prefill.posts -= 1
    await anyio.sleep(_REJOIN_SECONDS)
    if not prefill.posts:
        log.warning(
            "request %s, prompt %d: decode engine %s closed the ticket's connection: cancelling the prefill",
            *(prefill.request_id, prefill.prompt, prefill.decode_engine),
        )
        prefill.end()


def _unmatched(request: ProxiedRequest) -> RequestRefused:
    """Refuses a request of several prompts or samples that uses vllm-ascend's connector, and ends its attempt.

    That connector matches KV with a request by the request's id on prefill, which is that of one prompt and one sample.
    Decode would wait for all others without end.
    """
    reason = "the decode engines' connector takes one prompt and one sample (n) per request: send them one by one"
    log.warning("request %s: %s", request.request_id, reason)
    request.note_transfer_failure(_refused(reason, request))
    request.give_up()
    return RequestRefused(HTTPStatus.BAD_REQUEST, reason)


def _prefill_failed(ticket: TicketHeader, prefill: Prefill, failures: Sequence[Failure], may_follow: bool) -> Response:
    """Records that no KV comes for this ticket, and makes the answer for decode. The attempt ends, unless the client
    has got a part of the response already or decode computes the prompt itself. `may_follow`: a prefill under another
    ticket may succeed, which decode may post if it computes no prompts."""
    request = prefill.request
    reason = summary(failures)
    continues = request.reply.started or prefill.recomputes
    log.warning(
        "request %s, prompt %d, decode engine %s: prefill failed: %s: the decode engine %s",
        prefill.request_id,
        prefill.prompt,
        ticket.remote_engine_id,
        reason,
        "gets this reason and continues or ends its own answer" if continues else "gets this reason",
    )
    last = failures[-1]
    kind = FailureKind.PREFILL
    answer: Response = error_response(HTTPStatus.BAD_GATEWAY, f"prefill failed: {reason}")
    if last.then(EngineRole.PREFILL) is Then.END:
        kind, answer = last.kind, last.answer
    elif last.kind is FailureKind.NO_ENGINE:
        answer = last.answer
    unquoted = "; ".join(failure.for_all for failure in failures)
    failure = Failure(kind, reason, request.engine, answer, unquoted)
    request.note_transfer_failure(_without_kv(request, failures, failure), prefill)
    if not continues:
        request.give_up()
    return JSONResponse({"error": reason, "may_follow": may_follow}, status_code=HTTPStatus.BAD_GATEWAY.value)


def _without_kv(request: ProxiedRequest, failures: Sequence[Failure], failure: Failure) -> Failure:
    """Returns `failure`, or another one if decode may compute the prompt, or was to compute it and did not.

    `failures`: of all prefills of the prompt; no further one may follow.
    """
    if not lacks_prefill(failures):
        return failure
    failure = failure._replace(kind=FailureKind.NO_PREFILL)
    if not request.without_prefill:
        return failure
    reason = f"prefill failed: {failure.reason}; decode did not compute the prompt itself"
    return failure._replace(answer=error_response(HTTPStatus.SERVICE_UNAVAILABLE, reason))


def _gets_no_ticket(request: ProxiedRequest, reason: str, is_unfit: bool) -> None:
    """The decode engine ends the request, because prefill cannot be asked for what it lacks.

    `is_unfit`: whether every other decode engine would do the same.
    """
    log.warning("request %s: decode engine %s ends it: %s", request.request_id, request.engine, reason)
    request.note_transfer_failure(_refused(reason, request) if is_unfit else _transfer_failure(reason, request))
    if not request.reply.started:
        request.give_up()


def _refused(reason: str, request: ProxiedRequest) -> Failure:
    """The failure of a request that no decode engine can serve."""
    return Failure(FailureKind.REFUSED, reason, request.engine, error_response(HTTPStatus.BAD_REQUEST, reason))


def _transfer_failure(reason: str, request: ProxiedRequest) -> Failure:
    """The failure of an attempt whose KV did not come."""
    answer = error_response(HTTPStatus.BAD_GATEWAY, f"KV transfer failed: {reason}")
    return Failure(FailureKind.TRANSFER, reason, request.engine, answer)
