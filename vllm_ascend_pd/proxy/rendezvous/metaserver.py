# SPDX-License-Identifier: Apache-2.0
"""The metaserver: decode engines post tickets, failures, and questions about open tickets.

A ticket is answered when its prefill has ended. The client request that it is for waits at the decode engine meanwhile.
That says nothing about the transfer, which `PrefillJudge` judges when it is over.
A ticket has one prefill engine: others are asked only as long as none may have begun with it (`EnginePool.open`). If it
fails, a new decode request follows, with a ticket of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus

import anyio
import anyio.lowlevel
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
    error_response,
    guarded,
    read_all,
    when_disconnected,
)
from vllm_ascend_pd.proxy.rendezvous.judgement import PrefillJudge
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import DecodeAttempt, RequestTable, TicketProgress
from vllm_ascend_pd.proxy.rendezvous.tickets import ParsedTicket, answer_to_intent, failed, judge, read_ticket
from vllm_ascend_pd.proxy.routing.answers import (
    RULES,
    EngineRole,
    Failure,
    FailureKind,
    Then,
    are_used_up,
    engines_to_avoid,
    lacks_prefill,
    last_resorts,
    summary,
)
from vllm_ascend_pd.proxy.routing.deliveries import Deliveries
from vllm_ascend_pd.proxy.routing.engine_pool import EngineError, EnginePool, OutgoingRequest
from vllm_ascend_pd.proxy.routing.registry import EngineRanking
from vllm_ascend_pd.proxy.routing.strategies import prompt_of
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

_read_failure = partial(msgspec.json.decode, type=TransferFailure)
_read_question = partial(msgspec.json.decode, type=WaitingQuestion)


class Metaserver:
    """Serves the decode engines' posts. The event loop's thread owns it."""

    def __init__(
        self,
        request_table: RequestTable,
        pool: EnginePool,
        deliveries: Deliveries,
        judge: PrefillJudge,
        observer: ProxyObserver,
        settings: ProxySettings,
    ) -> None:
        """`request_table`: the client requests that tickets are matched with. `pool`: the prefill engines."""
        self._request_table = request_table
        self._pool = pool
        self._deliveries = deliveries
        self._judge = judge
        self._observer = observer
        self._tokens = settings.metaserver_tokens()
        """Of decode engines; none if they need none."""
        self._max_ticket_bytes = settings.max_ticket_bytes
        self._attempts = settings.attempts
        """How many prefills one prompt may have, over all decode attempts."""
        self._open: set[str] = set()
        """Ids of tickets that wait in a queue or are prefilled. `StallWatch` ends prefills at engines that stopped."""

    def routes(self) -> list[BaseRoute]:
        """A post that cannot be used is answered 400 or 413 (it cannot be read), 401 (the token is missing), 404 (no
        request waits for it) or 503 (the proxy shuts down). The body of errors is `{"error": reason}`."""
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

        200: a prefill engine has computed the prompt. 409: the request has all its tickets already. 410: the request
        has ended meanwhile. 502: the prefill failed; `may_follow` in the body says whether one under another ticket may
        succeed.
        """
        ticket = await self._request_table.read(request, self._max_ticket_bytes, read_ticket, "ticket")
        progress = self._register(ticket)
        progress.recomputes = request.headers.get(RECOMPUTES_HEADER) == "1"
        progress.waits()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_left, request, progress)
            if progress.posted:  # decode lost its connection, and posts the ticket again
                await progress.wait()
            else:
                await self._prefill(ticket, progress)
            tasks.cancel_scope.cancel()
        if progress.answer is None or progress.attempt.over:
            raise RequestRefused(HTTPStatus.GONE, "the client's request has ended or was retried")
        return progress.answer

    def _register(self, ticket: ParsedTicket) -> TicketProgress:
        """Registers a ticket with its attempt. Raises RequestRefused."""
        header = ticket.header
        attempt, prompt, is_sample = self._request_table.find(header.request_id)
        if not header.ticket_id and (prompt or is_sample):
            raise _unmatched(attempt)
        samples, is_authentic = attempt.request.samples, bool(self._tokens)
        progress = attempt.ticket(prompt, header.ticket_id, samples, header.replaces, is_authentic)
        if progress is None:
            raise RequestRefused(
                HTTPStatus.CONFLICT, "this request_id has all its tickets already, under other ticket ids"
            )
        return progress

    async def _prefill(self, ticket: ParsedTicket, progress: TicketProgress) -> None:
        """Prefills until that has succeeded or failed, or is cancelled. Sets the answer for decode."""
        ticket_id = ticket.header.ticket_id
        self._open.add(ticket_id)
        try:
            with progress.prefill(), self._observer.tickets_waiting.track_inprogress():
                failures = await self._run(ticket, progress)
                if failures:
                    progress.answer = _prefill_failed(ticket, progress, failures, self._may_follow(failures))
                else:
                    progress.answered = True
                    progress.attempt.prefilled()
                    progress.answer = progress.held or _PREFILLED
        finally:
            self._open.discard(ticket_id)

    async def _run(self, ticket: ParsedTicket, progress: TicketProgress) -> list[Failure]:
        """Prefills the ticket's prompt. Returns nothing if that succeeded, else why all prefills of the prompt failed,
        those under earlier decode attempts included. The decode attempt has ended if another one follows."""
        attempt, failures, engines = progress.attempt, progress.failures, self._pool.engines
        proxied = attempt.proxied
        if self._are_used_up(failures):
            return failures
        failed_before = frozenset(proxied.failed_prefill)
        avoid = failed_before if set(engines.urls) - failed_before else frozenset[str]()
        doubted = self._deliveries.passed_over([attempt.engine])
        ranking = engines.rank(prompt_of(attempt.request, progress.prompt), avoid, proxied.prefills, doubted)
        # Where decode computes the prompt at last, an engine that may have died of it is not asked twice.
        rules = [(failure, RULES[EngineRole.PREFILL, failure.kind]) for failure in failures]
        accidents = [failure for failure, rule in rules if rule.then is Then.ANEW or rule.outlived]
        ranking = ranking.then(last_resorts(EngineRole.PREFILL, accidents, avoid))
        failure = await self._attempt(ticket, progress, ranking)
        if failure is None:
            return []
        self._judge.failed(progress, failure)
        if progress.given_up:  # decode reported a failure, which was recorded if an engine had been asked
            return failures or [failure]
        proxied.prefill_failed(progress, failure)
        if attempt.over:
            return failures
        # A task that is cancelled just as it resumes would otherwise continue.
        await anyio.lowlevel.checkpoint_if_cancelled()
        if attempt.may_begin_anew and self._may_follow(failures):
            # Only the log gets the prefill engine's address.
            before = f"prefill at {failure.url} failed: "
            reason, unquoted = before + failure.reason, before + failure.for_all
            attempt.note_transfer_failure(
                Failure(FailureKind.TRANSFER, reason, attempt.engine, failure.answer, unquoted)
            )
            attempt.end()
        return failures

    async def _attempt(self, ticket: ParsedTicket, progress: TicketProgress, ranking: EngineRanking) -> Failure | None:
        """Prefills at one engine. The stall watch, or a report from decode, may end it early."""
        failure: Failure | None = None
        with self._pool.watch.over(progress), progress.scope:
            failure = await self._send(ticket, progress, ranking)
        if progress.cut is not None:
            failure = failed(*progress.cut, progress.engine)
        if failure is None:
            seconds = time.monotonic() - progress.silent_since
            self._observer.prefill_seconds.observe(seconds)
            self._pool.pace.note(progress.work, seconds)
        return failure

    async def _send(self, ticket: ParsedTicket, progress: TicketProgress, ranking: EngineRanking) -> Failure | None:
        attempt, base = progress.attempt, ticket.header.is_for_base_model
        request = attempt.request
        if ticket.token_ids is None:
            path = request.endpoint.value
            body = prefill_body(request, progress.prompt, ticket.encoded, attempt.request_id, base)
        else:
            path, body = Endpoint.COMPLETIONS.value, tokens_body(request, ticket.token_ids, ticket.encoded, base)
        sent = OutgoingRequest("POST", path, attempt.prefill_headers, body, attempt.request_id)
        try:
            async with self._pool.open(ranking, sent, progress) as response:
                answer = await read_all(response.chunks(), _MAX_PREFILL_ANSWER_BYTES)
        except EngineError as error:
            for_client = error_response(error.status, f"prefill failed: {error}")
            return Failure(error.kind, str(error), error.url, for_client)
        except TooLarge:
            reason = f"the prefill engine's answer exceeds {_MAX_PREFILL_ANSWER_BYTES} bytes"
            return failed(FailureKind.GARBAGE, reason, progress.engine)
        failure = judge(response.status, response.header("Content-Type"), answer, progress.engine)
        if failure is None and ticket.header.ticket_follows:
            progress.held = answer_to_intent(answer)
        return failure

    def _are_used_up(self, failures: Sequence[Failure]) -> bool:
        """Whether a prompt has had all its prefills. `failures`: of all so far."""
        return are_used_up(EngineRole.PREFILL, self._pool.engines.urls, failures, self._attempts)

    def _may_follow(self, failures: Sequence[Failure]) -> bool:
        """Whether another prefill of a prompt may succeed. `failures`: of all so far."""
        return engines_to_avoid(EngineRole.PREFILL, self._pool.engines.urls, failures, self._attempts) is not None

    # Failures.

    async def post_failure(self, request: Request) -> Response:
        """A decode engine reports that a ticket's KV did not come, or will not. Answers 200.

        Ends the ticket's prefill. If the client has got nothing yet, a new decode attempt may follow. A failure without
        a ticket's id is the whole request's: it gets no ticket, or no further one.
        """
        report = await self._request_table.read(request, _MAX_FAILURE_BYTES, _read_failure, "failure")
        attempt, prompt, _ = self._request_table.find(report.request_id)
        reason = one_line(report.reason, MAX_FAILURE_CHARS)
        if report.ticket_id:
            progress = attempt.tickets.get((prompt, report.ticket_id))
            if progress is None:
                raise RequestRefused(HTTPStatus.NOT_FOUND, "no such ticket was posted for this request_id")
            self._transfer_failed(progress, reason, report.by_prefill)
        else:
            _gets_no_ticket(attempt, reason, report.is_unfit)
        return JSONResponse({"status": "ok"})

    def _transfer_failed(self, progress: TicketProgress, reason: str, by_prefill: bool) -> None:
        attempt = progress.attempt
        in_flight = progress in self._pool.watch
        kind = FailureKind.TRANSFER if by_prefill or not in_flight else FailureKind.INTERRUPTED
        if progress.engine and not (progress.given_up or progress.has_failed):
            failure = failed(kind, reason, progress.engine)
            attempt.proxied.prefill_failed(progress, failure)
            self._judge.failed(progress, failure)
        progress.given_up = True
        failures, used_up = progress.failures, self._are_used_up(progress.failures)
        failure = _transfer_failure(FailureKind.TRANSFER, reason, attempt)
        if used_up:
            failure = _without_kv(attempt, failures, failure._replace(kind=FailureKind.PREFILL))
        attempt.note_transfer_failure(failure, progress)
        begin_anew = in_flight and attempt.may_begin_anew and not used_up
        attempt_ends = begin_anew or not (attempt.answering or progress.recomputes)
        if attempt_ends:
            attempt.end()
        if in_flight:
            progress.cut_short(kind, f"decode reported: {reason}")
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
        question = await self._request_table.read(request, _MAX_QUESTION_BYTES, _read_question, "question")
        waiting = [ticket_id for ticket_id in question.ticket_ids if ticket_id in self._open]
        return Response(msgspec.json.encode(WaitingAnswer(waiting)), media_type="application/json")


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
    unquoted = "; ".join(failure.for_all for failure in failures)
    failure = Failure(kind, reason, attempt.engine, answer, unquoted)
    attempt.note_transfer_failure(_without_kv(attempt, failures, failure), progress)
    if not continues:
        attempt.end()
    return JSONResponse({"error": reason, "may_follow": may_follow}, status_code=HTTPStatus.BAD_GATEWAY.value)


def _without_kv(attempt: DecodeAttempt, failures: Sequence[Failure], failure: Failure) -> Failure:
    """Returns `failure`, or another one if decode may compute the prompt, or was to compute it and did not.

    `failures`: of all prefills of the prompt; no further one may follow.
    """
    if not lacks_prefill(failures):
        return failure
    failure = failure._replace(kind=FailureKind.NO_PREFILL)
    if not attempt.without_prefill:
        return failure
    reason = f"prefill failed: {failure.reason}; decode did not compute the prompt itself"
    return failure._replace(answer=error_response(HTTPStatus.SERVICE_UNAVAILABLE, reason))


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
