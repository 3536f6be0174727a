# SPDX-License-Identifier: Apache-2.0
"""A client's request from its arrival to its answer: admission, body, one decode engine after the other, and the relay
of its response.

Every way in which a request can end passes here: the engine's response, a failed decode engine or prefill, a client
that leaves, and the proxy's shutdown.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import anyio
import anyio.lowlevel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from vllm_ascend_pd.core.ticket_params import PREFILL_AVAILABLE, PREFILL_WAIT_S, WHO_COMPUTES
from vllm_ascend_pd.proxy.http.arriving import BodyBudget
from vllm_ascend_pd.proxy.http.bodies import Content, LacksFieldError, decode_body, parse_client_request, read_fields
from vllm_ascend_pd.proxy.http.endpoints import (
    DECODE_ALONE_GET,
    DECODE_ALONE_POST,
    DECODE_COMPUTES,
    Endpoint,
    error_event,
)
from vllm_ascend_pd.proxy.http.engine_client import EngineResponse
from vllm_ascend_pd.proxy.http.messages import (
    RequestRefused,
    TooLarge,
    client_response_headers,
    error_response,
    excerpt,
    read_all,
    read_body,
    when_disconnected,
    who_computes,
)
from vllm_ascend_pd.proxy.http.streams import (
    NAMED_WITHIN_BYTES,
    Events,
    Opening,
    Renaming,
    Reply,
    error_of,
    names_no_reason,
    opening,
    split_errors,
)
from vllm_ascend_pd.proxy.rendezvous.judgement import PrefillJudge
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import DecodeAttempt, ProxiedRequest, RequestTable
from vllm_ascend_pd.proxy.routing.answers import (
    EngineRole,
    Failure,
    FailureKind,
    engines_to_avoid,
    is_completion,
    is_json,
    is_page,
    kind_of,
    last_resorts,
)
from vllm_ascend_pd.proxy.routing.deliveries import Deliveries
from vllm_ascend_pd.proxy.routing.engine_pool import EngineError, EnginePool, OutgoingRequest
from vllm_ascend_pd.proxy.routing.registry import EngineRanking
from vllm_ascend_pd.proxy.routing.strategies import NO_PROMPT, UNREAD_PROMPT, prompts_of
from vllm_ascend_pd.proxy.settings import MIB, ProxySettings

log = logging.getLogger(__name__)

_MAX_HELD_BYTES = 64 * 1024
"""The first events of a stream are held back until one has content. Longer ones certainly have."""
_MAX_ERROR_BYTES = 1024 * 1024
_REASON_SECONDS = 5.0
"""Decode reports in a message of its own why a transfer failed. That may arrive after its response."""
_BYTES_PER_PROMPT = 1024
"""That the proxy keeps of each prompt, however short it is."""
_LEAST_WAIT_SECONDS = 0.001
"""Shorter waits for prefill are not told to decode: they change no decision."""


class ClientRequests:
    """Answers clients with decode engines' responses to the same path, and decides about further attempts."""

    def __init__(
        self,
        request_table: RequestTable,
        decode: EnginePool,
        prefill: EnginePool,
        deliveries: Deliveries,
        judge: PrefillJudge,
        observer: ProxyObserver,
        budget: BodyBudget,
        settings: ProxySettings,
    ) -> None:
        """`request_table`: registers each attempt, so that tickets find it. `prefill`: decode is told whether any of
        its engines is well. `deliveries`: tells which of those reach decode. `judge`: is told when they have. `budget`:
        counts what is made of bodies; who reads them counts their bytes."""
        self._request_table = request_table
        self._pool = decode
        self._prefill = prefill
        self._deliveries = deliveries
        self._judge = judge
        self._observer = observer
        self._attempts = settings.attempts
        """How many engines may be asked for one request."""
        self._budget = budget
        self._metaserver = settings.metaserver()
        self._max_body_bytes = settings.max_body_mib * MIB

    def routes(self) -> list[BaseRoute]:
        return [
            *(Route(each.value, _AtPath(self, each.value, each), methods=["POST"]) for each in Endpoint),
            *(Route(path, _AtPath(self, path, None), methods=["GET"]) for path in DECODE_ALONE_GET),
            *(Route(path, _AtPath(self, path, None), methods=["POST"]) for path in DECODE_ALONE_POST),
        ]

    async def answer(self, request: Request, path: str, endpoint: Endpoint | None, send: Send) -> None:
        """Answers a client. `endpoint`: as in ProxiedRequest."""
        reply = Reply(send, request_id=request.headers.get("x-request-id"))
        with self._observer.request(path, reply):
            proxied = ProxiedRequest(request.method, path, endpoint, request.headers.raw, reply)
            try:
                with self._request_table.open(proxied), proxied.scope:
                    await self._serve(proxied, request)
            except RequestRefused as refused:
                self._refuse(proxied, refused)
            await _finish(proxied, request)

    async def _serve(self, proxied: ProxiedRequest, request: Request) -> None:
        """Reads the body, waits for a slot, and has decode answer. Returns when a decode engine has answered, or after
        `proxied.end`."""

        def client_left() -> None:
            if proxied.reply.finished:
                return
            log.info("request %s: the client left: ending its requests to engines", proxied.request_id)
            proxied.end(None)

        try:
            if proxied.endpoint is not None:
                proxied.who_computes = who_computes(proxied.headers)
            body = bytearray()
            if request.method == "POST":
                body = await read_body(request.stream(), self._max_body_bytes)
        except ClientDisconnect:
            return
        except TooLarge:
            limit = f"the request body exceeds {self._max_body_bytes} bytes"
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, limit) from None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(when_disconnected, request.receive, client_left)
            try:
                async with self._request_table.admission_of(proxied).slot():
                    with self._budget.hold() as parsed:
                        await self._request_table.may_decode(body)
                        _parse(proxied, body)
                        parsed.add(_BYTES_PER_PROMPT * len(proxied.request.prompts) if proxied.request else 0)
                        await anyio.lowlevel.checkpoint()  # the rest is for another turn of the event loop
                        await self._run(proxied)
            except RequestRefused as refused:
                self._refuse(proxied, refused)
                return
            tasks.cancel_scope.cancel()

    def _refuse(self, proxied: ProxiedRequest, refused: RequestRefused) -> None:
        if refused.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self._observer.refused.labels(str(refused.status.value)).inc()
        proxied.end(refused.response())

    async def _run(self, proxied: ProxiedRequest) -> None:
        """Asks one engine after the other, until one answers or no attempt is left. Returns when the client has got a
        response, or after `proxied.end` with an error."""
        pool, engines, reply = self._pool, self._pool.engines, proxied.reply
        clients_id = reply.request_id
        failures: list[Failure] = []
        begun, avoid = time.monotonic(), frozenset[str]()
        # Of other routes the answer is not named after the X-Request-Id.
        is_named = proxied.format is not None and proxied.format.id_field is None
        prompt = UNREAD_PROMPT if proxied.path in DECODE_COMPUTES else NO_PROMPT
        if proxied.request is not None:
            prompt = prompts_of(proxied.request)
        ranking = engines.rank(prompt)

        def another() -> bool:
            """Whether an attempt may follow the one in flight, if that fails through no fault of its own engine."""
            lost = Failure(FailureKind.TRANSFER, "", "", Response())
            return engines_to_avoid(pool.role, engines.urls, [*failures, lost], self._attempts) is not None

        def ranked_again() -> EngineRanking:
            return engines.rank(prompt, avoid).then(last_resorts(pool.role, failures, avoid))._replace(admitted=True)

        while True:
            with self._request_table.attempt(proxied, another) as attempt:
                reply.request_id = clients_id or attempt.request_id
                reply.renaming = Renaming.to(clients_id, attempt.request_id) if clients_id and is_named else None
                failure = await self._attempt(attempt, ranking)
            if failure is None:
                return
            is_busy = failure.kind is FailureKind.BUSY and failure.url and not attempt.begun
            if is_busy and time.monotonic() - begun < pool.limiter.timeout:
                ranking = ranked_again()
                continue
            self._observer.attempt_failed(EngineRole.DECODE, failure, attempt.request_id)
            pool.judge(failure.url, failure.kind)
            if reply.started or not self._falls_back(attempt, failure):
                failures.append(failure)
            failed = engines_to_avoid(pool.role, engines.urls, failures, self._attempts)
            if reply.started or failed is None:
                log.warning(
                    "request %s: decode at %s failed: %s: the client gets %d",
                    attempt.request_id,
                    failure.url,
                    failure.reason,
                    failure.answer.status_code,
                )
                proxied.end(failure.answer)
                return
            avoid = failed
            ranking = ranked_again()
            self._observer.retries[EngineRole.DECODE] += 1
            log.warning(
                "request %s: decode at %s failed: %s: another attempt follows, under another id",
                attempt.request_id,
                failure.url,
                failure.reason,
            )

    async def _attempt(self, attempt: DecodeAttempt, ranking: EngineRanking) -> Failure | None:
        """Asks one engine and passes its response on. Returns how that failed, or None."""
        proxied = attempt.proxied
        content = proxied.content
        if proxied.request is not None:
            advice = self._advice(attempt, ranking.first)
            content = decode_body(proxied.request, self._metaserver, attempt.request_id, advice)
        sent = OutgoingRequest(proxied.method, proxied.path, attempt.decode_headers, content, attempt.request_id)
        relay = ResponseRelay(attempt, self._judge, self._observer)
        failure: Failure | None = None
        responded = False
        with self._pool.watch.over(attempt), attempt.scope:
            try:
                async with self._pool.open(ranking, sent, attempt) as response:
                    responded = True
                    failure = await relay.run(response)
                    if failure is not None and failure.kind is FailureKind.BUSY:
                        raise self._pool.busy(failure.url, failure.reason, attempt.request_id)
                    if failure is None and response.is_success:
                        self._pool.judge(attempt.engine, None)
                        self._judge.answered(attempt, is_complete=True)
            except EngineError as error:
                failure = Failure(error.kind, str(error), error.url, error_response(error.status, str(error)))
                broken_off = responded and error.kind is FailureKind.LOST and not attempt.answering
                if broken_off and proxied.format is not None and proxied.format.breaks_off:
                    failure = await relay.transfer_failure() or failure
        if attempt.scope.cancelled_caught:  # because its KV did not come, or because its engine has stopped
            failure = attempt.transfer_failure
            if failure is None and attempt.cut is not None:
                kind, reason = attempt.cut
                failure = Failure(kind, reason, attempt.engine, error_response(HTTPStatus.GATEWAY_TIMEOUT, reason))
        return failure

    def _advice(self, attempt: DecodeAttempt, decode: Sequence[str]) -> Mapping[str, str | bool | float]:
        """The `kv_transfer_params` that tell decode what it does not know when it decides who computes the prompts.

        Decode follows them within its own bound (`max_decode_prompt_tokens`). It posts tickets for longer prompts.

        `decode`: URLs of the engines one of which gets the request.
        """
        proxied = attempt.proxied
        params: dict[str, str | bool | float] = {}
        if proxied.who_computes is not None:
            params[WHO_COMPUTES] = proxied.who_computes
        wait = self._prefill.queue_wait(self._deliveries.passed_over(decode))
        attempt.without_prefill = (proxied.prefill_gone or wait is None) and proxied.may_fall_back
        if attempt.without_prefill:
            params[PREFILL_AVAILABLE] = False
            if not proxied.told_without_prefill:
                proxied.told_without_prefill = True
                self._observer.without_prefill.inc()
        elif wait is not None and wait >= _LEAST_WAIT_SECONDS:
            params[PREFILL_WAIT_S] = round(wait, 3)
        return params

    def _falls_back(self, attempt: DecodeAttempt, failure: Failure) -> bool:
        """Whether decode is asked once more after a failure: no prefill engine was there, and the attempt did not tell
        decode so. All later attempts tell it."""
        proxied = attempt.proxied
        falls_back = failure.kind is FailureKind.NO_PREFILL and not attempt.without_prefill and proxied.may_fall_back
        proxied.prefill_gone |= falls_back
        return falls_back


@dataclass(frozen=True)
class _AtPath:
    """The ASGI endpoint of one path. `path` and `endpoint`: as in ProxiedRequest."""

    requests: ClientRequests
    path: str
    endpoint: Endpoint | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.requests.answer(Request(scope, receive), self.path, self.endpoint, send)


def _parse(proxied: ProxiedRequest, body: bytearray) -> None:
    """Sets `proxied.content`, and `proxied.request` if the body has prompts for prefill. Raises RequestRefused."""
    if proxied.endpoint is not None:
        with contextlib.suppress(LacksFieldError):
            proxied.request = parse_client_request(proxied.endpoint, body)
    elif proxied.method == "POST":
        read_fields(body)
    proxied.content = Content(body)


async def _finish(proxied: ProxiedRequest, request: Request) -> None:
    """Answers a request that no decode engine has answered completely."""
    reply, response = proxied.reply, proxied.final_response
    if response is None or reply.finished:
        return
    if reply.started:
        await reply.break_off(error_event(proxied.path, bytes(response.body)))
    else:
        await response(request.scope, request.receive, reply.send)


class ResponseRelay:
    """Relays the response of one attempt.

    While the client has got nothing, a failure is returned instead of passed on, so that another engine can be asked.
    """

    def __init__(self, attempt: DecodeAttempt, judge: PrefillJudge, observer: ProxyObserver) -> None:
        self._attempt = attempt
        self._reply = attempt.proxied.reply
        self._judge = judge
        self._observer = observer

    async def run(self, response: EngineResponse) -> Failure | None:
        """Passes the response on. Returns how it failed, or None. Raises EngineError's causes."""
        self._attempt.heard()
        if response.status >= 500:
            return await self._server_error(response)
        content_type, is_plain = response.header("Content-Type"), response.header("Content-Encoding") is None
        if response.status < 400 and (not response.is_success or is_page(content_type)):
            what = "a page" if is_page(content_type) else "no answer"
            return self._failure(FailureKind.GARBAGE, f"HTTP {response.status} with {what}: is it vLLM?")
        if response.is_event_stream and is_plain:
            return await self._relay_events(response)
        is_checked = response.is_success and is_plain and self._attempt.proxied.method != "HEAD"
        return await self._relay_body(response, is_checked)

    async def _relay_body(self, response: EngineResponse, is_checked: bool) -> Failure | None:
        """`is_checked`: whether the body must be an answer."""
        # The headers may come long before the body. They are held back with it, so that a failed prefill can still
        # become the client's status.
        chunks = self._chunks(response)
        first, is_whole = b"", True
        async for chunk in chunks:
            first += chunk
            if len(first) >= (_MAX_HELD_BYTES if is_checked else NAMED_WITHIN_BYTES):
                is_whole = False
                break
        if is_checked and not self._is_answer(first, is_whole):
            return self._failure(FailureKind.GARBAGE, f"HTTP {response.status} without an answer: is it vLLM?")
        await self._begin(response, first)
        async for chunk in chunks:
            await self._reply.write(chunk)
        await self._reply.finish()
        return None

    def _is_answer(self, body: bytes, is_whole: bool) -> bool:
        """Whether a successful answer is vLLM's. `body`: all of it, or its first part."""
        if not is_whole:
            return body.lstrip().startswith(b"{")
        return is_json(body) if self._attempt.proxied.endpoint is None else is_completion(body)

    async def _relay_events(self, response: EngineResponse) -> Failure | None:
        chunks = self._chunks(response)
        events = Events(_MAX_HELD_BYTES)
        held = b""
        async for chunk in chunks:
            held += events.feed(chunk)
            found = opening(held)
            if found is Opening.FAILED:
                found_in = self._error_event(held, "as the first event")
                return found_in if found_in.kind is FailureKind.BUSY else await self._explained(found_in)
            if found is Opening.CONTENT or len(held) > _MAX_HELD_BYTES:
                break
        else:  # vLLM 0.30 ends a completion like this if its transfer has failed
            return await self._explained(self._failure(FailureKind.ERROR, "its stream ended without an answer"))
        await self._begin(response, b"")
        if self._attempt.prefilled_at is not None:
            self._observer.after_prefill_seconds.observe(time.monotonic() - self._attempt.prefilled_at)
        failure = await self._write_events(held)
        async for chunk in chunks:
            failure = await self._write_events(events.feed(chunk)) or failure
        failure = await self._write_events(events.rest()) or failure
        await self._reply.finish()
        return failure

    async def _chunks(self, response: EngineResponse) -> AsyncIterator[bytes]:
        """The response's body. While the client takes a chunk, nothing is expected from the engine."""
        async for chunk in response.chunks():
            self._attempt.pause()
            yield chunk
            self._attempt.heard()

    async def _begin(self, response: EngineResponse, first: bytes) -> None:
        # A task that is cancelled just as it resumes would otherwise continue, and another attempt could not follow.
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._attempt.answering = True
        if response.is_success:
            self._judge.answered(self._attempt, is_complete=False)
        await self._reply.start(response)
        await self._reply.write(first)

    async def _write_events(self, events: bytes) -> Failure | None:
        """Passes events on. vLLM's error event has no reason when a transfer has failed: replaces it by one that has.
        Returns the failure that an error event shows."""
        failure: Failure | None = None
        for part, status in split_errors(events):
            known = await self.transfer_failure() if status >= 500 else None
            if status >= 500:
                failure = known or self._error_event(part, "after tokens")
            await self._reply.write(
                part if known is None else error_event(self._attempt.proxied.path, bytes(known.answer.body))
            )
        return failure

    async def _server_error(self, response: EngineResponse) -> Failure:
        """The failure behind an HTTP 5xx."""
        status = f"HTTP {response.status}"
        try:
            body = await read_all(response.chunks(), _MAX_ERROR_BYTES)
        except TooLarge:
            reason = f"{status} with a body of more than {_MAX_ERROR_BYTES} bytes"
            return await self._explained(self._failure(FailureKind.ERROR, reason, response.status))
        passed_on = Response(body, status_code=response.status)
        passed_on.raw_headers = client_response_headers(response.headers)
        failure = Failure(FailureKind.ERROR, f"{status}: {excerpt(body)}", self._attempt.engine, passed_on, status)
        return await self._explained(failure)

    async def _explained(self, failure: Failure) -> Failure:
        """The best known reason for an error before the client has got anything: a reported transfer failure, a guess
        if the error has no reason, or the error itself."""
        return await self.transfer_failure() or self._guess(failure.answer) or failure

    async def transfer_failure(self) -> Failure | None:
        """Why KV did not come, if that is the reason of an error. Waits a moment for decode to report it. Other
        connectors, whose tickets have no id, never report that."""
        if any(ticket_id for _, ticket_id in self._attempt.tickets):
            with anyio.move_on_after(_REASON_SECONDS):
                await self._attempt.transfer_failed.wait()
        return self._attempt.transfer_failure

    def _guess(self, answer: Response) -> Failure | None:
        """What the attempt's tickets tell about an error without a reason."""
        attempt = self._attempt
        if attempt.proxied.request is None or not names_no_reason(bytes(answer.body)):
            return None
        if not attempt.tickets:
            reason = "it failed before it posted any ticket here: can it reach the metaserver?"
        elif any(ticket.left for ticket in attempt.tickets.values()):
            reason = "it gave up waiting for prefill"
        else:
            reason = f"it failed without a reason: see its log, request {attempt.request_id}"
        return self._failure(FailureKind.ERROR, reason, answer.status_code)

    def _failure(self, kind: FailureKind, reason: str, status: int = HTTPStatus.BAD_GATEWAY) -> Failure:
        """`status`: for the client. Engines, and proxies before them, use codes that HTTP does not define, such as 529.
        Those become 502."""
        try:
            known = HTTPStatus(status)
        except ValueError:
            known = HTTPStatus.BAD_GATEWAY
        return Failure(kind, reason, self._attempt.engine, error_response(known, f"decode engine: {reason}"))

    def _error_event(self, events: bytes, where: str) -> Failure:
        """The failure that an error event shows. vLLM may find only in a stream that it is busy. Then it has begun with
        nothing, and has posted no ticket."""
        status, body = error_of(events)
        answer = Response(body, status_code=status, media_type="application/json")
        unquoted = f"an error, {status}, {where}"
        kind = kind_of(EngineRole.DECODE, status, None, body, well=True)
        if kind is FailureKind.BUSY and not (self._attempt.answering or self._attempt.begun):
            return Failure(kind, unquoted, self._attempt.engine, answer)
        return Failure(FailureKind.ERROR, excerpt(body), self._attempt.engine, answer, unquoted)
