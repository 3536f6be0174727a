# SPDX-License-Identifier: Apache-2.0
"""The route that a client's request takes: admission, body, decode engine, response."""

from __future__ import annotations

import logging
from http import HTTPStatus

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from vllm_ascend_pd.proxy.http.bodies import parse_client_request
from vllm_ascend_pd.proxy.http.client_json import ForDecodeAlone, read_fields
from vllm_ascend_pd.proxy.http.endpoints import Endpoint, error_event
from vllm_ascend_pd.proxy.http.errors import RequestRefused, body_too_large
from vllm_ascend_pd.proxy.http.headers import who_computes
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.http.streams import TooLarge, read_all, when_disconnected
from vllm_ascend_pd.proxy.rendezvous.decode_requests import DecodeRequests, ForwardedRequest
from vllm_ascend_pd.proxy.rendezvous.observer import Observer, Span
from vllm_ascend_pd.proxy.rendezvous.proxied_request import ProxiedRequest
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable

log = logging.getLogger(__name__)


class ClientEndpoint:
    """ASGI endpoint for one path: answers a client with a decode engine's response to the same path.

    Every way in which a request can end passes here: the engine's response, a failed decode engine or prefill, a
    client that leaves, and the proxy's shutdown.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint | None,
        *,
        request_table: RequestTable,
        decode_requests: DecodeRequests,
        observer: Observer,
        max_body_bytes: int,
        read_timeout: float,
    ) -> None:
        """
        Args:
            path: the route.
            endpoint: what the route's requests look like; None if decode answers them without prefill.
            request_table: of all endpoints together.
            decode_requests: sends requests to decode engines.
            observer: receives reports about each request.
            max_body_bytes: limit of a client's body.
            read_timeout: seconds for a client to send its body, and for each write that it must accept.
        """
        self._path = path
        self._endpoint = endpoint
        self._request_table = request_table
        self._decode_requests = decode_requests
        self._observer = observer
        self._max_body_bytes = max_body_bytes
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        reply = Reply(send, request_id=request.headers.get("x-request-id"), timeout=self._read_timeout)
        with self._observer.request(request.method, self._path, request.headers.raw, reply) as span:
            try:
                async with self._request_table.admitted(receive) as receive:
                    await self._respond(scope, receive, reply, span)
            except ClientDisconnect:
                return  # while it waited for admission
            except RequestRefused as refused:
                self._observer.request_refused(refused.status)
                await refused.response()(scope, receive, reply.send)

    async def _respond(self, scope: Scope, receive: Receive, reply: Reply, span: Span) -> None:
        """Serves an admitted request until the client has its response."""
        with self._request_table.open(span) as proxied, proxied.scope:
            await self._serve(proxied, Request(scope, receive), reply)
        if proxied.final_response is None or reply.finished:
            return
        if reply.started:
            await reply.break_off(error_event(self._path, bytes(proxied.final_response.body)))
        else:
            await proxied.final_response(scope, receive, reply.send)

    async def _serve(self, proxied: ProxiedRequest, request: Request, reply: Reply) -> None:
        """Reads the body and passes it to decode. Returns when a decode engine has answered, or after
        `proxied.end`."""
        headers = request.headers.raw
        try:
            wanted = None if self._endpoint is None else who_computes(headers)
            body = await self._read_body(request)
        except ClientDisconnect:
            return
        except RequestRefused as refused:
            proxied.end(refused.response())
            return

        def client_left() -> None:
            if reply.finished:
                return
            log.info("request %s: the client left: ending its requests to engines", proxied.request_id)
            proxied.end(None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(when_disconnected, request.receive, client_left)
            try:
                content = await self._parse(proxied, body)
            except RequestRefused as refused:
                proxied.end(refused.response())
                return
            forwarded = ForwardedRequest(request.method, self._path, self._endpoint, headers, content, wanted)
            await self._decode_requests.run(proxied, forwarded, reply)
            tasks.cancel_scope.cancel()

    async def _read_body(self, request: Request) -> bytes | None:
        """Returns the body, or None for methods without one."""
        if request.method in ("GET", "HEAD"):
            return None
        limit = self._max_body_bytes
        try:
            with anyio.fail_after(self._read_timeout):
                return await read_all(request.stream(), limit)
        except TooLarge:
            raise body_too_large(limit) from None
        except TimeoutError:
            raise RequestRefused(HTTPStatus.REQUEST_TIMEOUT, "the request body did not arrive") from None

    async def _parse(self, proxied: ProxiedRequest, body: bytes | None) -> bytes:
        """Sets `proxied.request` if the body has prompts for prefill. Returns the body for decode otherwise.

        Raises RequestRefused."""
        if body is None:
            return b""
        try:
            if self._endpoint is None:
                read_fields(body)
                return body
            proxied.request = parse_client_request(self._endpoint, body)
        except ForDecodeAlone as alone:
            return alone.body
        return b""
