# SPDX-License-Identifier: Apache-2.0
"""The metaserver: decode engines post tickets, failures, and questions about open tickets.

A ticket is answered when its prefill has ended. The client request that it is for waits at the decode engine meanwhile.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import TypeVar

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
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
from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.bodies import ClientRequest, samples_of
from vllm_ascend_pd.proxy.http.messages import (
    Action,
    BearerToken,
    RequestRefused,
    TooLarge,
    error_response,
    read_all,
    when_disconnected,
)
from vllm_ascend_pd.proxy.rendezvous.observer import Observer
from vllm_ascend_pd.proxy.rendezvous.prefill_requests import ParsedTicket, PrefillRequests, failed, read_ticket
from vllm_ascend_pd.proxy.rendezvous.request_table import DecodeAttempt, RequestTable, TicketMatch, TicketProgress
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind, Then, lacks_prefill, summary
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool

log = logging.getLogger(__name__)

_REJOIN_SECONDS = 5.0
"""After it has lost its connection, decode posts a ticket again within 3 s (`metaserver_retries`)."""
_MAX_FAILURE_BYTES = 64 * 1024
_MAX_QUESTION_BYTES = 128 * 1024
"""`MAX_ASKED` ids of 64 characters each, and the JSON around them."""

_read_failure = partial(msgspec.json.decode, type=TransferFailure)
_read_question = partial(msgspec.json.decode, type=WaitingQuestion)
_T = TypeVar("_T")


class Metaserver:
    """Serves the decode engines' posts. The event loop's thread owns it."""

    def __init__(
        self,
        request_table: RequestTable,
        pool: EnginePool,
        observer: Observer,
        *,
        token: str | None,
        max_ticket_bytes: int,
        prefill_attempts: int,
    ) -> None:
        """
        Args:
            request_table: the client requests that tickets are matched with.
            pool: the prefill engines.
            observer: receives reports about tickets and prefills.
            token: bearer token of decode engines; None if they need none.
            max_ticket_bytes: limit of a ticket.
            prefill_attempts: how many prefills one prompt may have.
        """
        self._request_table = request_table
        self._prefill_requests = PrefillRequests(pool, observer, attempts=prefill_attempts)
        self._observer = observer
        self._token = None if token is None else BearerToken(token)
        self._max_ticket_bytes = max_ticket_bytes
        self._open: Counter[str] = Counter()
        """Number of posts that wait, by ticket id. A ticket posted again may count twice."""

    def routes(self) -> list[BaseRoute]:
        """A post that cannot be used is answered 400 (it cannot be read), 401 (the token is missing), 404 (no request
        waits for it) or 503 (the proxy shuts down). The body of errors is `{"error": reason}`."""
        return [
            Route(METASERVER_PATH, _refusing(self.post_ticket), methods=["POST"]),
            Route(METASERVER_PATH + FAILURE_SUFFIX, _refusing(self.post_failure), methods=["POST"]),
            Route(METASERVER_PATH + WAITING_SUFFIX, _refusing(self.post_question), methods=["POST"]),
        ]

    # Tickets.

    async def post_ticket(self, request: Request) -> Response:
        """Answers a posted ticket.

        200: a prefill engine has computed the prompt. 409: the request has all its tickets already. 410: the request
        has ended meanwhile. 502: the prefill failed; `may_follow` in the body says whether one under another ticket may
        succeed.
        """
        ticket = await self._read(request, self._max_ticket_bytes, read_ticket, "ticket")
        progress, client = self._register(ticket)
        progress.recomputes = request.headers.get(RECOMPUTES_HEADER) == "1"
        progress.waits()
        with self._waiting(ticket.header.ticket_id):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when_left, request, progress)
                if progress.begun:  # decode lost its connection, and posts the ticket again
                    await progress.ended.wait()
                else:
                    await self._prefill(client, ticket, progress)
                tasks.cancel_scope.cancel()
        if progress.answer is None or progress.attempt.over:
            return _error(HTTPStatus.GONE, "the client's request has ended or was retried")
        return progress.answer

    def _register(self, ticket: ParsedTicket) -> tuple[TicketProgress, ClientRequest]:
        """Registers a ticket with its attempt. Also returns the client's request. Raises RequestRefused."""
        header = ticket.header
        attempt, prompt, is_sample = self._find(header.request_id)
        client = attempt.proxied.request
        assert client is not None
        if not header.ticket_id and (prompt or is_sample):
            raise _unmatched(attempt)
        progress = attempt.ticket(prompt, header.ticket_id, samples_of(client), header.replaces)
        if progress is None:
            raise RequestRefused(
                HTTPStatus.CONFLICT, "this request_id has all its tickets already, under other ticket ids"
            )
        return progress, client

    async def _prefill(self, client: ClientRequest, ticket: ParsedTicket, progress: TicketProgress) -> None:
        """Prefills until that has succeeded or failed, or is cancelled. Sets the answer for decode."""
        try:
            with progress.attempt.prefill() as scope, self._observer.ticket_waits():
                progress.begin(scope)
                failures = await self._prefill_requests.run(client, ticket, progress)
                if failures:
                    may_follow = self._prefill_requests.may_follow(failures)
                    progress.answer = _prefill_failed(ticket, progress, failures, may_follow)
                else:
                    progress.answered = True
                    progress.attempt.prefilled()
                    progress.answer = JSONResponse({"status": "ok"})
        finally:
            progress.ended.set()

    # Failures.

    async def post_failure(self, request: Request) -> Response:
        """A decode engine reports that a ticket's KV did not come, or will not. Answers 200.

        Ends the ticket's prefill. If the client has got nothing yet, a new decode attempt may follow. A failure without
        a ticket's id is the whole request's: it gets no ticket, or no further one.
        """
        report = await self._read(request, _MAX_FAILURE_BYTES, _read_failure, "failure")
        attempt, prompt, _ = self._find(report.request_id)
        reason = one_line(report.reason, MAX_FAILURE_CHARS)
        if report.ticket_id:
            progress = attempt.tickets.get((prompt, report.ticket_id))
            if progress is None:
                return _error(HTTPStatus.NOT_FOUND, "no such ticket was posted for this request_id")
            self._transfer_failed(progress, reason)
        else:
            _gets_no_ticket(attempt, reason, report.is_unfit)
        return JSONResponse({"status": "ok"})

    def _transfer_failed(self, progress: TicketProgress, reason: str) -> None:
        attempt, call = progress.attempt, progress.call
        in_flight = self._prefill_requests.in_flight(call)
        if call.engines and not progress.given_up:
            attempt.proxied.prefill_failed(progress, failed(FailureKind.TRANSFER, reason, call.engine))
        progress.given_up = True
        used_up = self._prefill_requests.used_up(progress)
        kind = FailureKind.PREFILL if used_up else FailureKind.TRANSFER
        attempt.note_transfer_failure(_transfer_failure(kind, reason, attempt), progress)
        begin_anew = in_flight and attempt.may_begin_anew and not used_up
        attempt_ends = begin_anew or not (attempt.answering or progress.recomputes)
        if attempt_ends:
            attempt.proxied.begin_anew(progress)
        if in_flight:
            call.cut_short(FailureKind.TRANSFER, f"decode reported: {reason}")
        elif not attempt_ends:  # otherwise the next attempt logs it
            log.warning(
                "request %s, prompt %d: decode engine %s reports a failed transfer and continues without it: %s",
                attempt.request_id,
                progress.prompt,
                attempt.engine,
                reason,
            )

    # Questions.

    async def post_question(self, request: Request) -> Response:
        """Tells a decode engine which of its tickets still wait for prefill, so that their timeouts exclude that time.

        Only engines that have a ticket know its id, so an engine learns nothing about other tickets.
        """
        question = await self._read(request, _MAX_QUESTION_BYTES, _read_question, "question")
        waiting = [ticket_id for ticket_id in question.ticket_ids if ticket_id in self._open]
        return Response(msgspec.json.encode(WaitingAnswer(waiting)), media_type="application/json")

    @owned
    @contextmanager
    def _waiting(self, ticket_id: str) -> Iterator[None]:
        """A ticket is open for the time of the `with` block: it waits in the queue, or a healthy engine prefills it.
        `StallWatch` ends prefills at other engines."""
        self._open[ticket_id] += 1
        try:
            yield
        finally:
            self._open[ticket_id] -= 1
            if not self._open[ticket_id]:
                del self._open[ticket_id]

    # All posts.

    async def _read(self, request: Request, limit: int, decode: Callable[[bytes], _T], name: str) -> _T:
        """Checks a post's token, and reads and decodes its body.

        Args:
            request: the post.
            limit: bytes of the body.
            decode: decodes the body. Raises one of `UNREADABLE`.
            name: what the post is called in errors.

        Raises:
            RequestRefused: 401 without the token, 400 for a body that cannot be read, 503 if the proxy shuts down.
        """
        if self._token is not None and not self._token.is_in(request):
            reason = "the bearer token is missing or wrong (metaserver_token_file)"
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, reason)
        try:
            with self._request_table.until_shut_down():
                body = await read_all(request.stream(), limit)
            return decode(body)
        except TooLarge:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, f"the {name} exceeds {limit} bytes") from None
        except ClientDisconnect:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, f"the {name} did not arrive") from None
        except UNREADABLE as error:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, f"not a {name}: {error}") from None

    def _find(self, engine_request_id: str) -> TicketMatch:
        """Finds the request that a post is about. Raises RequestRefused (404) if there is none."""
        try:
            return self._request_table.find(engine_request_id)
        except LookupError:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "no request is waiting under this request_id") from None


def _refusing(action: Action) -> Action:
    """An endpoint that turns RequestRefused into an answer in the metaserver's shape."""

    async def endpoint(request: Request) -> Response:
        try:
            return await action(request)
        except RequestRefused as refused:
            return _error(refused.status, refused.message)

    return endpoint


async def _cancel_when_left(request: Request, progress: TicketProgress) -> None:
    """Cancels the prefill if the decode engine closes the connection and does not post the ticket again."""
    await when_disconnected(request.receive, progress.lost)
    await anyio.sleep(_REJOIN_SECONDS)
    if progress.left:
        log.warning(
            "request %s, prompt %d: decode engine %s closed the ticket's connection: cancelling the prefill",
            progress.attempt.request_id,
            progress.prompt,
            progress.attempt.engine,
        )
        progress.cancel()


def _unmatched(attempt: DecodeAttempt) -> RequestRefused:
    """Refuses a request of several prompts or samples that uses vllm-ascend's connector, and ends its attempt.

    That connector matches KV with a request by the request's id on prefill, which is that of one prompt and one sample.
    Decode would wait for all others without end.
    """
    reason = "the decode engines' connector takes one prompt and one sample (n) per request: send them one by one"
    log.warning("request %s: %s", attempt.request_id, reason)
    attempt.note_transfer_failure(_refused(reason, attempt))
    attempt.end()
    return RequestRefused(HTTPStatus.BAD_REQUEST, reason)


def _prefill_failed(
    ticket: ParsedTicket, progress: TicketProgress, failures: list[Failure], may_follow: bool
) -> Response:
    """Records that no KV comes for this ticket, and makes the answer for decode. The attempt ends, unless the client
    has got a part of the response already or decode computes the prompt itself. `may_follow`: a prefill under another
    ticket may succeed, which decode may post if it computes no prompts."""
    attempt = progress.attempt
    reason = summary(failures)
    continues = attempt.answering or progress.recomputes
    log.warning(
        "request %s, prompt %d, decode engine %s: prefill failed: %s: the decode engine %s",
        attempt.request_id,
        progress.prompt,
        ticket.header.remote_engine_id,
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
    if lacks_prefill(failures):
        kind = FailureKind.NO_PREFILL
        if attempt.without_prefill:
            answer = error_response(
                HTTPStatus.SERVICE_UNAVAILABLE, f"prefill failed: {reason}; decode did not compute the prompt itself"
            )
    unquoted = "; ".join(failure.for_all for failure in failures)
    attempt.note_transfer_failure(Failure(kind, reason, attempt.engine, answer, unquoted), progress)
    if not continues:
        attempt.proxied.begin_anew(progress)
    return JSONResponse({"error": reason, "may_follow": may_follow}, status_code=HTTPStatus.BAD_GATEWAY.value)


def _gets_no_ticket(attempt: DecodeAttempt, reason: str, is_unfit: bool) -> None:
    """The decode engine ends the request, because prefill cannot be asked for what it lacks.

    `is_unfit`: whether every other decode engine would do the same.
    """
    log.warning("request %s: decode engine %s ends it: %s", attempt.request_id, attempt.engine, reason)
    failure = _refused(reason, attempt) if is_unfit else _transfer_failure(FailureKind.TRANSFER, reason, attempt)
    attempt.note_transfer_failure(failure)
    if not attempt.answering:
        attempt.end()


def _refused(reason: str, attempt: DecodeAttempt) -> Failure:
    """The failure of a request that no decode engine can serve."""
    return Failure(FailureKind.REFUSED, reason, attempt.engine, error_response(HTTPStatus.BAD_REQUEST, reason))


def _transfer_failure(kind: FailureKind, reason: str, attempt: DecodeAttempt) -> Failure:
    """The failure of an attempt whose KV did not come."""
    answer = error_response(HTTPStatus.BAD_GATEWAY, f"KV transfer failed: {reason}")
    return Failure(kind, reason, attempt.engine, answer)


def _error(status: HTTPStatus, reason: str) -> JSONResponse:
    """The metaserver's shape of errors."""
    return JSONResponse({"error": reason}, status_code=status.value)
