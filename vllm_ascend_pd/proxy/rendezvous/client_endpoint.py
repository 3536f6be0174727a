# SPDX-License-Identifier: Apache-2.0
"""A client's request from its arrival to its answer: admission, body, one decode engine after the other, and the relay
of its response.

Every way in which a request can end passes here: the engine's response, a failed decode engine or prefill, a client
that leaves, and the proxy's shutdown.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import anyio
import anyio.lowlevel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from vllm_ascend_pd.core.ticket_params import (
    BY_PREFILL,
    PREFILL_AVAILABLE,
    PREFILL_FIRST_TOKENS,
    PREFILL_WAIT_S,
    WHO_COMPUTES,
)
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
    beside,
    client_response_headers,
    disconnected,
    error_response,
    excerpt,
    read_body,
    who_computes,
)
from vllm_ascend_pd.proxy.http.streams import (
    ERROR_KEY,
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
from vllm_ascend_pd.proxy.rendezvous.deliveries import Deliveries
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import ProxiedRequest, RequestTable
from vllm_ascend_pd.proxy.routing.answers import (
    EngineRole,
    Failure,
    FailureKind,
    is_completion,
    is_json,
    is_page,
    kind_of,
    last_resorts,
)
from vllm_ascend_pd.proxy.routing.dispatch import EngineError, EnginePool
from vllm_ascend_pd.proxy.routing.engines import EngineRanking
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
_ENDPOINTS = {each.value: each for each in Endpoint}
"""By path."""


class ClientRequests:
    """Answers clients with decode engines' responses to the same path, and decides about further attempts.

    It is the ASGI application of all these paths.
    """

    def __init__(
        self,
        request_table: RequestTable,
        decode: EnginePool,
        prefill: EnginePool,
        deliveries: Deliveries,
        observer: ProxyObserver,
        budget: BodyBudget,
        settings: ProxySettings,
    ) -> None:
        """`request_table`: registers each attempt, so that tickets find it. `prefill`: decode is told whether any of
        its engines is well. `deliveries`: tells which of those reach decode, and is told when they have. `budget`:
        counts what is made of bodies; who reads them counts their bytes."""
        self._request_table = request_table
        self._decode_pool = decode
        self._prefill_pool = prefill
        self._deliveries = deliveries
        self._observer = observer
        self._budget = budget
        self._metaserver = settings.metaserver()
        self._max_body_bytes = settings.max_body_mib * MIB

    def routes(self) -> list[BaseRoute]:
        return [
            *(Route(path, self, methods=["POST"]) for path in (*_ENDPOINTS, *DECODE_ALONE_POST)),
            *(Route(path, self, methods=["GET"]) for path in DECODE_ALONE_GET),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a client."""
        client = Request(scope, receive)
        path = scope["path"]
        reply = Reply(send, request_id=client.headers.get("x-request-id"))
        with self._observer.request(path, reply):
            request = ProxiedRequest(client.method, path, _ENDPOINTS.get(path), client.headers.raw, reply)
            try:
                with self._request_table.open(request), request.lifetime:
                    await self._serve(request, client)
            except RequestRefused as refused:
                if refused.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
                    self._observer.refused.labels(str(refused.status.value)).inc()
                request.end(refused.response())
            response = request.final_response  # if no decode engine has answered completely
            if response is not None and not reply.started:
                await response(scope, receive, reply.send)
            elif response is not None and not reply.finished:
                await reply.break_off(error_event(path, bytes(response.body)))

    async def _serve(self, request: ProxiedRequest, client: Request) -> None:
        """Reads the body, waits for a slot, and has decode answer. Returns when a decode engine has answered, or after
        `request.end`. Raises RequestRefused."""
        try:
            if request.endpoint is not None:
                request.who_computes = who_computes(request.headers)
            body = bytearray()
            if request.method == "POST":
                body = await read_body(client.stream(), self._max_body_bytes)
        except ClientDisconnect:
            return
        except TooLarge:
            limit = f"the request body exceeds {self._max_body_bytes} bytes"
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, limit) from None
        with beside(_end_when_left(request, client.receive)):
            async with self._request_table.slot(request):
                with self._budget.hold() as parsed:
                    await self._request_table.await_decoding(body)
                    _parse(request, body)
                    if request.parsed is not None:
                        self._budget.add(parsed, _BYTES_PER_PROMPT * len(request.parsed.prompts))
                    await anyio.lowlevel.checkpoint()  # the rest is for another turn of the event loop
                    await self._run(request)

    async def _run(self, request: ProxiedRequest) -> None:
        """Asks one engine after the other, until one answers or no attempt is left. Returns when the client has got a
        response, or after `request.end` with an error."""
        pool, reply, failures = self._decode_pool, request.reply, request.failures
        clients_id = reply.request_id
        begun, avoid = time.monotonic(), frozenset[str]()
        # Only the answers of these routes are named after the X-Request-Id.
        is_named = request.format is not None and request.format.id_field is None
        prompt = UNREAD_PROMPT if request.path in DECODE_COMPUTES else NO_PROMPT
        if request.parsed is not None:
            prompt = prompts_of(request.parsed)
        while True:
            last = last_resorts(pool.role, failures, avoid) if avoid else ()
            ranking = pool.engines.rank(prompt, avoid, last=last)
            with self._request_table.attempt(request):
                reply.request_id = clients_id or request.request_id
                reply.renaming = Renaming.to(clients_id, request.request_id) if clients_id and is_named else None
                failure = await self._attempt(request, ranking)
            if failure is None:
                return
            request.readmitted = True
            is_busy = failure.kind is FailureKind.BUSY and failure.url and not request.begun
            if is_busy and time.monotonic() - begun < pool.queue.timeout:
                continue
            self._observer.attempt_failed(EngineRole.DECODE, failure, request.request_id)
            pool.note_request_result(failure.url, failure.kind)
            if reply.started or not self._falls_back(request, failure):
                failures.append(failure)
            failed = pool.to_avoid(failures)
            if reply.started or failed is None:
                log.warning(
                    "request %s: decode at %s failed: %s: the client gets %d",
                    *(request.request_id, failure.url, failure.reason, failure.answer.status_code),
                )
                request.end(failure.answer)
                return
            avoid = failed
            self._observer.retries[EngineRole.DECODE] += 1
            log.warning(
                "request %s: decode at %s failed: %s: another attempt follows, under another id",
                *(request.request_id, failure.url, failure.reason),
            )

    async def _attempt(self, request: ProxiedRequest, ranking: EngineRanking) -> Failure | None:
        """Asks one engine and passes its response on. Returns how that failed, or None."""
        content = request.content
        if request.parsed is not None:
            advice = self._advice(request, ranking.first)
            content = decode_body(request.parsed, self._metaserver, request.request_id, advice)
        relay = ResponseRelay(request, self._deliveries, self._observer)
        failure: Failure | None = None
        responded = False
        sent = request.method, request.path, request.decode_headers, content
        with self._decode_pool.watch.over(request) as scope:
            try:
                async with self._decode_pool.open(request, ranking, *sent) as response:
                    responded = True
                    failure = await relay.run(response)
                    if failure is not None and failure.kind is FailureKind.BUSY:
                        raise self._decode_pool.busy(failure.url, failure.reason, request.request_id)
                    if failure is None and response.is_success:
                        self._decode_pool.note_request_result(request.engine, None)
                        self._deliveries.answered(request, is_complete=True)
            except EngineError as error:
                failure = Failure(error.kind, str(error), error.url, error_response(error.status, str(error)))
                broken_off = responded and error.kind is FailureKind.LOST and not request.reply.started
                if broken_off and request.format is not None and request.format.breaks_off:
                    failure = await relay.transfer_failure() or failure
        if scope.cancelled_caught:  # because its KV did not come, or because its engine has stopped
            failure = request.transfer_failure
            if failure is None and request.cut is not None:
                kind, reason = request.cut
                failure = Failure(kind, reason, request.engine, error_response(HTTPStatus.GATEWAY_TIMEOUT, reason))
        return failure

    def _advice(self, request: ProxiedRequest, decode: Sequence[str]) -> Mapping[str, str | bool | float]:
        """The `kv_transfer_params` that tell decode what it does not know. It decides who computes the prompts, and
        whether they get blocks before.

        Decode follows them within its own bound (`max_decode_prompt_tokens`). It posts tickets for longer prompts.

        `decode`: URLs of the engines one of which gets the request.
        """
        params: dict[str, str | bool | float] = {}
        if request.who_computes is not None:
            params[WHO_COMPUTES] = request.who_computes
        wait = self._prefill_pool.queue_wait(self._deliveries.passed_over(decode))
        request.without_prefill = (request.prefill_gone or wait is None) and request.who_computes != BY_PREFILL
        if request.without_prefill:
            params[PREFILL_AVAILABLE] = False
            if not request.told_without_prefill:
                request.told_without_prefill = True
                self._observer.without_prefill.inc()
        elif wait is not None and wait >= _LEAST_WAIT_SECONDS:
            params[PREFILL_WAIT_S] = round(wait, 3)
        # After a failure, what the engines have said may be wrong: one of another version may have taken a place.
        if not request.failures and (first := self._prefill_pool.prefill_first_tokens()):
            params[PREFILL_FIRST_TOKENS] = first
        return params

    def _falls_back(self, request: ProxiedRequest, failure: Failure) -> bool:
        """Whether decode is asked once more after a failure: no prefill engine was there, and the attempt did not tell
        decode so. All later attempts tell it."""
        untold = not request.without_prefill and request.who_computes != BY_PREFILL
        falls_back = failure.kind is FailureKind.NO_PREFILL and untold
        request.prefill_gone |= falls_back
        return falls_back


async def _end_when_left(request: ProxiedRequest, receive: Receive) -> None:
    await disconnected(receive)
    if not request.reply.finished:
        log.info("request %s: the client left: ending its requests to engines", request.request_id)
        request.end(None)


def _parse(request: ProxiedRequest, body: bytearray) -> None:
    """Sets `request.content`, and `request.parsed` if the body has prompts for prefill. Raises RequestRefused."""
    if request.endpoint is not None:
        with contextlib.suppress(LacksFieldError):
            request.parsed = parse_client_request(request.endpoint, body)
    elif request.method == "POST":
        read_fields(body)
    request.content = Content(body)


class ResponseRelay:
    """Relays the response of one attempt.

    While the client has got nothing, a failure is returned instead of passed on, so that another engine can be asked.
    """

    def __init__(self, request: ProxiedRequest, deliveries: Deliveries, observer: ProxyObserver) -> None:
        self._request = request
        self._reply = request.reply
        self._deliveries = deliveries
        self._observer = observer

    async def run(self, response: EngineResponse) -> Failure | None:
        """Passes the response on. Returns how it failed, or None. Raises EngineError's causes."""
        self._request.silent_since = time.monotonic()
        if response.status >= 500:
            return await self._server_error(response)
        is_plain = not response.is_encoded
        if response.status < 400 and (not response.is_success or is_page(response.content_type)):
            what = "a page" if is_page(response.content_type) else "no answer"
            return self._failure(FailureKind.GARBAGE, f"HTTP {response.status} with {what}: is it vLLM?")
        if response.is_event_stream and is_plain:
            return await self._relay_events(response)
        is_checked = response.is_success and is_plain and self._request.method != "HEAD"
        return await self._relay_body(response, is_checked)

    async def _relay_body(self, response: EngineResponse, is_checked: bool) -> Failure | None:
        """`is_checked`: whether the body must be an answer."""
        # The headers may come long before the body. They are held back with it, so that a failed prefill can still
        # become the client's status.
        first, is_whole = b"", True
        while part := await self._read(response):
            first += part
            if len(first) >= (_MAX_HELD_BYTES if is_checked else NAMED_WITHIN_BYTES):
                is_whole = False
                break
        if is_checked and not self._is_answer(first, is_whole):
            return self._failure(FailureKind.GARBAGE, f"HTTP {response.status} without an answer: is it vLLM?")
        await self._begin(response, first)
        while part := await self._read(response):
            await self._reply.write(part)
        await self._reply.finish()
        return None

    def _is_answer(self, body: bytes, is_whole: bool) -> bool:
        """Whether a successful answer is vLLM's. `body`: all of it, or its first part."""
        if not is_whole:
            return body.lstrip().startswith(b"{")
        return is_json(body) if self._request.endpoint is None else is_completion(body)

    async def _relay_events(self, response: EngineResponse) -> Failure | None:
        events = Events(_MAX_HELD_BYTES)
        held = b""
        while part := await self._read(response):
            held += events.feed(part)
            found = opening(held)
            if found is Opening.FAILED:
                found_in = self._error_event(held, "as the first event")
                return found_in if found_in.kind is FailureKind.BUSY else await self._explained(found_in)
            if found is Opening.CONTENT or len(held) > _MAX_HELD_BYTES:
                break
        else:  # vLLM 0.30 ends a completion like this if its transfer has failed
            return await self._explained(self._failure(FailureKind.ERROR, "its stream ended without an answer"))
        await self._begin(response, b"")
        if self._request.prefilled_at is not None:
            self._observer.after_prefill_seconds.observe(time.monotonic() - self._request.prefilled_at)
        failure = await self._write_events(held)
        while part := await self._read(response):
            failure = await self._write_events(events.feed(part)) or failure
        failure = await self._write_events(events.rest()) or failure
        await self._reply.finish()
        return failure

    async def _read(self, response: EngineResponse) -> bytes:
        """Returns the next part of the response's body; empty at its end. While the client takes a part, nothing is
        expected from the engine."""
        self._request.silent_since = time.monotonic()
        part = await response.read()
        if part:
            self._request.silent_since = math.inf
        return part

    async def _begin(self, response: EngineResponse, first: bytes) -> None:
        # A task that is cancelled just as it resumes would otherwise continue, and another attempt could not follow.
        await anyio.lowlevel.checkpoint_if_cancelled()
        if response.is_success:
            self._deliveries.answered(self._request, is_complete=False)
        await self._reply.start(response)
        await self._reply.write(first)

    async def _write_events(self, events: bytes) -> Failure | None:
        """Passes events on. vLLM's error event has no reason when a transfer has failed: replaces it by one that has.
        Returns the failure that an error event shows."""
        failure: Failure | None = None
        if ERROR_KEY not in events:
            await self._reply.write(events)
            return None
        for part, status in split_errors(events):
            known = await self.transfer_failure() if status >= 500 else None
            if status >= 500:
                failure = known or self._error_event(part, "after tokens")
            await self._reply.write(
                part if known is None else error_event(self._request.path, bytes(known.answer.body))
            )
        return failure

    async def _server_error(self, response: EngineResponse) -> Failure:
        """The failure behind an HTTP 5xx."""
        status = f"HTTP {response.status}"
        try:
            body = await response.buffer(_MAX_ERROR_BYTES)
        except TooLarge:
            reason = f"{status} with a body of more than {_MAX_ERROR_BYTES} bytes"
            return await self._explained(self._failure(FailureKind.ERROR, reason, response.status))
        passed_on = Response(body, status_code=response.status)
        passed_on.raw_headers = client_response_headers(response.headers)
        failure = Failure(FailureKind.ERROR, f"{status}: {excerpt(body)}", self._request.engine, passed_on, status)
        return await self._explained(failure)

    async def _explained(self, failure: Failure) -> Failure:
        """The best known reason for an error before the client has got anything: a reported transfer failure, a guess
        if the error has no reason, or the error itself."""
        return await self.transfer_failure() or self._guess(failure.answer) or failure

    async def transfer_failure(self) -> Failure | None:
        """Why KV did not come, if that is the reason of an error. Waits a moment for decode to report it. Other
        connectors, whose tickets have no id, never report that."""
        if any(ticket_id for _, ticket_id in self._request.prefills):
            with anyio.move_on_after(_REASON_SECONDS):
                await self._request.transfer_failed.wait()
        return self._request.transfer_failure

    def _guess(self, answer: Response) -> Failure | None:
        """What the attempt's tickets tell about an error without a reason."""
        request = self._request
        if request.parsed is None or not names_no_reason(bytes(answer.body)):
            return None
        if not request.prefills:
            reason = "it failed before it posted any ticket here: can it reach the metaserver?"
        elif not all(prefill.posts for prefill in request.prefills.values()):
            reason = "it gave up waiting for prefill"
        else:
            reason = f"it failed without a reason: see its log, request {request.request_id}"
        return self._failure(FailureKind.ERROR, reason, answer.status_code)

    def _failure(self, kind: FailureKind, reason: str, status: int = HTTPStatus.BAD_GATEWAY) -> Failure:
        """`status`: for the client. Engines, and proxies before them, use codes that HTTP does not define, such as 529.
        Those become 502."""
        try:
            known = HTTPStatus(status)
        except ValueError:
            known = HTTPStatus.BAD_GATEWAY
        return Failure(kind, reason, self._request.engine, error_response(known, f"decode engine: {reason}"))

    def _error_event(self, events: bytes, where: str) -> Failure:
        """The failure that an error event shows. vLLM may find only in a stream that it is busy. Then it has begun with
        nothing, and has posted no ticket."""
        status, body = error_of(events)
        answer = Response(body, status_code=status, media_type="application/json")
        unquoted = f"an error, {status}, {where}"
        kind = kind_of(EngineRole.DECODE, status, None, body, well=True)
        if kind is FailureKind.BUSY and not (self._reply.started or self._request.begun):
            return Failure(kind, unquoted, self._request.engine, answer)
        return Failure(FailureKind.ERROR, excerpt(body), self._request.engine, answer, unquoted)
