# SPDX-License-Identifier: Apache-2.0
"""The metaserver's route for tickets: finds the waiting request, has its prompt prefilled, and answers decode."""

from __future__ import annotations

import logging
from http import HTTPStatus

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_ascend_pd.core.metaserver import RECOMPUTES_HEADER
from vllm_ascend_pd.proxy.http.bodies import samples_of
from vllm_ascend_pd.proxy.http.errors import error_response
from vllm_ascend_pd.proxy.http.streams import when_disconnected
from vllm_ascend_pd.proxy.rendezvous.decode_attempt import DecodeAttempt, TicketProgress
from vllm_ascend_pd.proxy.rendezvous.observer import Observer
from vllm_ascend_pd.proxy.rendezvous.open_tickets import OpenTickets
from vllm_ascend_pd.proxy.rendezvous.post_reader import PostReader, PostRefused, error_answer
from vllm_ascend_pd.proxy.rendezvous.prefill_answer import bad_gateway
from vllm_ascend_pd.proxy.rendezvous.prefill_requests import PrefillRequests
from vllm_ascend_pd.proxy.rendezvous.request_table import TicketMatch
from vllm_ascend_pd.proxy.rendezvous.tickets import ParsedTicket, TicketHeader, read_ticket
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind, Then, lacks_prefill, summary

log = logging.getLogger(__name__)

# After it has lost its connection, decode posts a ticket again within 3 s.
_REJOIN_SECONDS = 5.0


class TicketPosts:
    """Serves tickets. The answer to a ticket comes when its prefill has ended."""

    def __init__(
        self,
        reader: PostReader,
        open_tickets: OpenTickets,
        prefill_requests: PrefillRequests,
        observer: Observer,
        *,
        max_ticket_bytes: int,
    ) -> None:
        self._reader = reader
        self._open_tickets = open_tickets
        self._prefill_requests = prefill_requests
        self._observer = observer
        self._max_ticket_bytes = max_ticket_bytes

    async def post_ticket(self, request: Request) -> Response:
        """Answers a posted ticket.

        200: a prefill engine has computed the prompt. 400: not a ticket. 401: the token is missing. 404: no request
        waits for it. 409: the request has all its tickets already. 410: the request has ended meanwhile. 502: the
        prefill failed. 503: the proxy shuts down. The body of errors is `{"error": reason}`.
        """
        try:
            ticket = await self._reader.read(request, self._max_ticket_bytes, read_ticket, "ticket")
            match = self._reader.find(ticket.header.request_id)
            progress = _register(match, ticket.header)
        except PostRefused as refused:
            return refused.answer
        progress.recomputes = request.headers.get(RECOMPUTES_HEADER) == "1"
        progress.waits()
        with self._open_tickets.held(ticket.header.ticket_id):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when_left, request, match, progress)
                if progress.begun:  # decode lost its connection, and posts the ticket again
                    await progress.ended.wait()
                else:
                    await self._prefill(match, ticket, progress)
                tasks.cancel_scope.cancel()
        if progress.answer is None or match.attempt.over:
            return error_answer(HTTPStatus.GONE, "the client's request has ended or was retried")
        return progress.answer

    async def _prefill(self, match: TicketMatch, ticket: ParsedTicket, progress: TicketProgress) -> None:
        """Prefills until that has succeeded or failed, or is cancelled. Sets the answer for decode."""
        try:
            with match.attempt.prefill() as scope, self._observer.ticket_waits():
                progress.begin(scope)
                failures = await self._prefill_requests.run(match, ticket, progress)
                if failures:
                    progress.answer = _prefill_failed(match, ticket.header, progress, failures)
                else:
                    progress.answered = True
                    match.attempt.prefilled()
                    progress.answer = JSONResponse({"status": "ok"})
        finally:
            progress.ended.set()


async def _cancel_when_left(request: Request, match: TicketMatch, progress: TicketProgress) -> None:
    """Cancels the prefill if the decode engine closes the connection and does not post the ticket again."""
    await when_disconnected(request.receive, progress.lost)
    await anyio.sleep(_REJOIN_SECONDS)
    if progress.left:
        log.warning(
            "request %s, prompt %d: decode engine %s closed the ticket's connection: cancelling the prefill",
            match.attempt.request_id,
            match.prompt,
            match.attempt.engine,
        )
        progress.cancel()


def _register(match: TicketMatch, header: TicketHeader) -> TicketProgress:
    """Registers the ticket with its attempt. Raises PostRefused."""
    if not header.ticket_id and (match.prompt or match.is_sample):
        raise _unmatched(match.attempt)
    failed_before, samples = match.proxied.prefill_failures(match.prompt), samples_of(match.request)
    progress = match.attempt.ticket(match.prompt, header.ticket_id, failed_before, samples, header.replaces)
    if progress is None:
        raise PostRefused(HTTPStatus.CONFLICT, "this request_id has all its tickets already, under other ticket ids")
    return progress


def _unmatched(attempt: DecodeAttempt) -> PostRefused:
    """Refuses a request of several prompts or samples that uses vllm-ascend's connector, and ends its attempt.

    That connector matches KV with a request by the request's id on prefill, which is that of one prompt and one sample.
    Decode would wait for all others without end.
    """
    reason = "the decode engines' connector takes one prompt and one sample (n) per request: send them one by one"
    log.warning("request %s: %s", attempt.request_id, reason)
    answer = error_response(HTTPStatus.BAD_REQUEST, reason)
    attempt.note_transfer_failure(Failure(FailureKind.REFUSED, reason, attempt.engine, answer))
    attempt.end()
    return PostRefused(HTTPStatus.BAD_REQUEST, reason)


def _prefill_failed(
    match: TicketMatch, header: TicketHeader, progress: TicketProgress, failures: list[Failure]
) -> Response:
    """Records that no KV comes for this ticket, and makes the answer for decode. The attempt ends, unless the client
    has got a part of the response already or decode computes the prompt itself."""
    attempt = match.attempt
    reason = summary(failures)
    continues = attempt.answering or progress.recomputes
    log.warning(
        "request %s, prompt %d, decode engine %s: prefill failed: %s: the decode engine %s",
        attempt.request_id,
        match.prompt,
        header.remote_engine_id,
        reason,
        "gets this reason and continues or ends its own answer" if continues else "gets this reason",
    )
    last = failures[-1]
    answer, kind = bad_gateway(f"prefill failed: {reason}"), FailureKind.PREFILL
    if last.then(EngineRole.PREFILL) is Then.END:
        answer, kind = last.answer, last.kind
    elif last.kind is FailureKind.NO_ENGINE:
        answer = last.answer
    if lacks_prefill(failures):
        kind = FailureKind.NO_PREFILL
        if attempt.without_prefill:
            answer = error_response(
                HTTPStatus.SERVICE_UNAVAILABLE, f"prefill failed: {reason}; decode did not compute the prompt itself"
            )
    unquoted = "; ".join(failure.for_all for failure in failures)
    attempt.note_transfer_failure(Failure(kind, reason, attempt.engine, answer, unquoted), progress)
    if not continues:
        match.proxied.begin_anew(attempt, match.prompt, progress)
    return error_answer(HTTPStatus.BAD_GATEWAY, reason)
