# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: to a decode engine and back, byte for byte."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from http import HTTPStatus

import anyio
import anyio.lowlevel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vllm_ascend_pd.proxy.http.bodies import decode_body, parse_client_request
from vllm_ascend_pd.proxy.http.client_json import ForDecodeAlone, read_fields
from vllm_ascend_pd.proxy.http.endpoints import REQUEST_FORMATS, Endpoint, error_event
from vllm_ascend_pd.proxy.http.engine_client import EngineResponse
from vllm_ascend_pd.proxy.http.errors import RequestRefused, error_response, excerpt
from vllm_ascend_pd.proxy.http.events import Events, Opening, error_of, names_no_reason, opening, split_errors
from vllm_ascend_pd.proxy.http.headers import client_response_headers, decode_request_headers, prefill_request_headers
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.http.streams import TooLarge, read_all, when_disconnected
from vllm_ascend_pd.proxy.rendezvous.observer import Observer, Span
from vllm_ascend_pd.proxy.rendezvous.proxied_request import DecodeAttempt, ProxiedRequest, RequestTable
from vllm_ascend_pd.proxy.rendezvous.retry import DECODE_AGAIN, Failure, engines_to_avoid, last_resorts, may_follow
from vllm_ascend_pd.proxy.routing.engine_pool import EngineError, EnginePool, EngineRequest
from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind
from vllm_ascend_pd.proxy.routing.prompts import NO_PROMPT, prompts_of
from vllm_ascend_pd.proxy.routing.ranking import EngineRanking
from vllm_ascend_pd.proxy.routing.registry import EngineRole
from vllm_ascend_pd.proxy.routing.stall_watch import StallWatch
from vllm_ascend_pd.proxy.settings import ProxySettings

log = logging.getLogger(__name__)

# A stream's first events are held back until they say something; longer ones say something.
_MAX_HELD_BYTES = 64 * 1024
_MAX_ERROR_BYTES = 1024 * 1024
# Decode says why a transfer failed in a message of its own, which may come after its answer.
_REASON_SECONDS = 5.0


class Forward:
    """ASGI endpoint that answers a client with a decode engine's answer to the same path.

    Every end a request can have is here: the engine's answer, an engine that fails, a failed prefill, the
    client leaving, the proxy stopping.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint | None,
        *,
        settings: ProxySettings,
        request_table: RequestTable,
        decode: EnginePool,
        watch: StallWatch,
        observer: Observer,
    ) -> None:
        self._path = path
        self._endpoint = endpoint
        """None: a request that decode answers alone, without prefill."""
        self._settings = settings
        self._request_table = request_table
        self._decode = decode
        self._watch = watch
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        reply = Reply(send, request_id=request.headers.get("x-request-id"), timeout=self._settings.read_timeout)
        with self._observer.request(request.method, self._path, request.headers.raw, reply) as span:
            await self._proxy(reply, scope, receive, span)

    async def _proxy(self, reply: Reply, scope: Scope, receive: Receive, span: Span) -> None:
        try:
            async with self._request_table.admitted(receive) as receive:
                with self._request_table.open(span) as proxied, proxied.scope:
                    await self._serve(proxied, Request(scope, receive), reply)
                if proxied.final_response is None or reply.finished:
                    return
                if reply.started:
                    await reply.break_off(error_event(self._path, bytes(proxied.final_response.body)))
                else:
                    await proxied.final_response(scope, receive, reply.send)
        except ClientDisconnect:
            return  # it waited until then
        except RequestRefused as refused:
            self._observer.request_refused(refused.status)
            await refused.response()(scope, receive, reply.send)

    async def _serve(self, proxied: ProxiedRequest, request: Request, reply: Reply) -> None:
        try:
            content = await self._prepare(proxied, request)
        except ClientDisconnect:
            return
        except RequestRefused as refused:
            proxied.end(refused.response())
            return

        def client_left() -> None:
            if reply.finished:
                return
            log.info("request %s: the client left: stopping its engines", proxied.request_id)
            proxied.end(None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(when_disconnected, request.receive, client_left)
            await self._answer(proxied, request, content, reply)
            tasks.cancel_scope.cancel()

    async def _prepare(self, proxied: ProxiedRequest, request: Request) -> bytes:
        """Reads the body. One that has prompts to be prefilled becomes the proxied's request; any other is returned,
        to be sent as it is."""
        if request.method in ("GET", "HEAD"):
            return b""
        limit = self._settings.max_body_bytes
        try:
            with anyio.fail_after(self._settings.read_timeout):
                body = await read_all(request.stream(), limit)
        except TooLarge:
            raise RequestRefused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request body exceeds {limit} bytes"
            ) from None
        except TimeoutError:
            raise RequestRefused(HTTPStatus.REQUEST_TIMEOUT, "the request body did not arrive") from None
        try:
            if self._endpoint is None:
                read_fields(body)
                return body
            proxied.request = parse_client_request(self._endpoint, body)
        except ForDecodeAlone as alone:
            return alone.body
        return b""

    async def _answer(self, proxied: ProxiedRequest, request: Request, content: bytes, reply: Reply) -> None:
        """Asks one decode engine after the other, until the client has got something, or all that may be asked."""
        pool = self._decode
        clients_id = reply.request_id
        failures: list[Failure] = []
        prompt = NO_PROMPT if proxied.request is None else prompts_of(proxied.request)
        choice = pool.ranker.rank(prompt)

        def another() -> bool:
            return may_follow(pool.urls, failures, self._settings.decode_attempts, DECODE_AGAIN)

        while True:
            with proxied.attempt(another) as attempt:
                reply.request_id = clients_id or attempt.request_id
                failure = await self._attempt(proxied, attempt, choice, request, content, reply)
                if failure is not None:
                    attempt.span.failed(failure)
            if failure is None:
                return
            self._observer.attempt_failed(EngineRole.DECODE, failure, attempt.request_id)
            pool.judge(failure.url, failure.kind)
            failures.append(failure)
            avoid = engines_to_avoid(pool.urls, failures, self._settings.decode_attempts, DECODE_AGAIN)
            if reply.started or avoid is None:
                log.warning(
                    "request %s: decode at %s failed: %s: the client gets %d",
                    attempt.request_id,
                    failure.url,
                    failure.reason,
                    failure.answer.status_code,
                )
                proxied.span.failed(failure)
                proxied.end(failure.answer)
                return
            choice = pool.ranker.rank(prompt, avoid).then(last_resorts(failures, avoid, DECODE_AGAIN)).of_one_admitted()
            self._observer.attempt_retried(EngineRole.DECODE)
            proxied.span.retried(failure, choice.first)
            log.warning(
                "request %s: decode at %s failed: %s: attempt %d, under another id, goes to %s",
                attempt.request_id,
                failure.url,
                failure.reason,
                len(failures) + 1,
                choice.first,
            )

    async def _attempt(
        self,
        proxied: ProxiedRequest,
        attempt: DecodeAttempt,
        choice: EngineRanking,
        request: Request,
        content: bytes,
        reply: Reply,
    ) -> Failure | None:
        headers = attempt.span.onto(decode_request_headers(request.headers.raw, attempt.request_id))
        attempt.prefill_headers = prefill_request_headers(headers)
        failure: Failure | None = None
        answered = False
        if proxied.request is None:
            attempt.alone = True
        else:
            content = decode_body(proxied.request, self._settings.metaserver_url, attempt.request_id)
        with self._watch.over(attempt), attempt.scope:
            try:
                sent = EngineRequest(request.method, self._path, headers, content, attempt.request_id)
                async with self._decode.open(choice, sent, attempt) as answer:
                    answered = True
                    failure = await self._relay(attempt, answer, reply)
                    if failure is None:
                        self._decode.judge(attempt.engine, None)
            except EngineError as error:
                failure = Failure(error.kind, str(error), error.url, error_response(error.status, str(error)))
                if answered and error.kind is FailureKind.LOST and self._may_be_broken_off(attempt):
                    failure = await self._transfer_failure(attempt) or failure
            except TimeoutError:
                log.warning("request %s: the client stopped reading: giving it up", attempt.request_id)
                proxied.end(None)
        # Cancelled for its transfer's failure, or its engine's silence, or whatever else came of that first.
        return attempt.transfer_failure or _silence(attempt) if attempt.scope.cancelled_caught else failure

    async def _relay(self, attempt: DecodeAttempt, answer: EngineResponse, reply: Reply) -> Failure | None:
        """Passes the answer on, unless it is a failure before anything was sent."""
        attempt.heard()
        if answer.status >= 500:
            return await self._server_error(attempt, answer)
        chunks = _chunks(attempt, answer)
        if not answer.is_event_stream or answer.header("Content-Encoding") is not None:
            # An answer's headers may come long before its body: hold them back, so that a failed prefill can still
            # be answered with its status.
            first = await anext(chunks, b"")
            await self._begin(attempt, answer, reply, first)
            async for chunk in chunks:
                await reply.write(chunk)
            await reply.finish()
            return None

        events = Events(_MAX_HELD_BYTES)
        held = b""
        async for chunk in chunks:
            held += events.feed(chunk)
            says = opening(held)
            if says is Opening.FAILED:
                return await self._explained(attempt, _error_event(attempt, held, "as the first event"))
            if says is Opening.CONTENT or len(held) > _MAX_HELD_BYTES:
                break
        await self._begin(attempt, answer, reply, b"")
        if attempt.prefilled_at is not None:
            self._observer.first_token_after_prefill(time.monotonic() - attempt.prefilled_at)
        failure = await self._write_events(attempt, reply, held)
        async for chunk in chunks:
            failure = await self._write_events(attempt, reply, events.feed(chunk)) or failure
        failure = await self._write_events(attempt, reply, events.rest()) or failure
        await reply.finish()
        return failure

    async def _begin(self, attempt: DecodeAttempt, answer: EngineResponse, reply: Reply, first: bytes) -> None:
        # A task that is cancelled when it is about to go on anyway goes on: the client has nothing yet.
        await anyio.lowlevel.checkpoint_if_cancelled()
        attempt.answering = True
        await reply.start(answer)
        await reply.write(first)

    async def _write_events(self, attempt: DecodeAttempt, reply: Reply, events: bytes) -> Failure | None:
        """A stream that ends by a failed transfer says so without the reason: puts it in. Returns what failed."""
        failure: Failure | None = None
        for part, status in split_errors(events):
            known = await self._transfer_failure(attempt) if status >= 500 else None
            if status >= 500:
                failure = known or _error_event(attempt, part, "after tokens")
            await reply.write(part if known is None else error_event(self._path, bytes(known.answer.body)))
        return failure

    async def _server_error(self, attempt: DecodeAttempt, answer: EngineResponse) -> Failure:
        what = f"HTTP {answer.status}"
        try:
            body = await read_all(answer.chunks(), _MAX_ERROR_BYTES)
        except TooLarge:
            reason = f"{what}, in more than {_MAX_ERROR_BYTES} bytes"
            told = error_response(_known(answer.status), f"decode engine: {reason}")
            return await self._explained(attempt, Failure(FailureKind.ERROR, reason, attempt.engine, told))
        response = Response(body, status_code=answer.status)
        response.raw_headers = client_response_headers(answer.headers)
        own = Failure(FailureKind.ERROR, f"{what}: {excerpt(body)}", attempt.engine, response, what)
        return await self._explained(attempt, own)

    async def _explained(self, attempt: DecodeAttempt, own: Failure) -> Failure:
        """Decode answered with an error, before anything was sent on: what is known of it, or else what it says."""
        return await self._transfer_failure(attempt) or self._guess(attempt, own.answer) or own

    def _guess(self, attempt: DecodeAttempt, answer: Response) -> Failure | None:
        """For an error that names no reason, when decode could not tell it either: what is to be seen from here."""
        if attempt.alone or not names_no_reason(bytes(answer.body)):
            return None
        if not attempt.tickets:
            reason = "it failed before any ticket for its KV came here: can it reach the metaserver?"
        elif any(ticket.left for ticket in attempt.tickets.values()):
            reason = "it gave up waiting for prefill"
        else:
            reason = f"it failed, and has not said why: see its log, request {attempt.request_id}"
        told = error_response(_known(answer.status_code), f"decode engine: {reason}")
        return Failure(FailureKind.ERROR, reason, attempt.engine, told)

    def _may_be_broken_off(self, attempt: DecodeAttempt) -> bool:
        """Whether a lost connection may be an engine's way to say that a request failed."""
        return self._endpoint is not None and REQUEST_FORMATS[self._endpoint].breaks_off and not attempt.answering

    async def _transfer_failure(self, attempt: DecodeAttempt) -> Failure | None:
        """Why KV did not come, if it did not, for an answer that is an error: waits a moment for decode to say so."""
        if attempt.tickets:
            with anyio.move_on_after(_REASON_SECONDS):
                await attempt.transfer_failed.wait()
        return attempt.transfer_failure


async def _chunks(attempt: DecodeAttempt, answer: EngineResponse) -> AsyncIterator[bytes]:
    """The answer's body. Nothing is expected from the engine while the client takes what has come."""
    async for chunk in answer.chunks():
        attempt.pause()
        yield chunk
        attempt.heard()


def _silence(attempt: DecodeAttempt) -> Failure | None:
    """The failure of an attempt that was cut short because its engine has stopped."""
    if attempt.cut is None:
        return None
    kind, reason = attempt.cut
    return Failure(kind, reason, attempt.engine, error_response(HTTPStatus.GATEWAY_TIMEOUT, reason))


def _known(status: int) -> HTTPStatus:
    """Of an error: an engine, or what is before it, may have a code of its own, 529 for one."""
    try:
        return HTTPStatus(status)
    except ValueError:
        return HTTPStatus.BAD_GATEWAY


def _error_event(attempt: DecodeAttempt, events: bytes, where: str) -> Failure:
    status, body = error_of(events)
    answer = Response(body, status_code=status, media_type="application/json")
    return Failure(FailureKind.ERROR, excerpt(body), attempt.engine, answer, f"an error, {status}, {where}")
