# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: to a decode engine and back, byte for byte."""

from __future__ import annotations

import logging
from http import HTTPStatus

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .bodies import Endpoint, decode_body, parse_client_request
from .engines import EngineError, EnginePool
from .errors import RequestRefused, error_response
from .exchange import Exchange, Exchanges
from .headers import decode_request_headers, prefill_request_headers
from .reply import Reply
from .settings import ProxySettings
from .streams import TooLarge, read_all, when_disconnected

log = logging.getLogger(__name__)


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
        exchanges: Exchanges,
        decode: EnginePool,
    ) -> None:
        self._path = path
        self._endpoint = endpoint
        """None: a request without body, which needs no prefill."""
        self._settings = settings
        self._exchanges = exchanges
        self._decode = decode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        reply = Reply(send, request_id=request.headers.get("x-request-id"), timeout=self._settings.read_timeout)
        try:
            with self._exchanges.open() as exchange:
                reply.request_id = reply.request_id or exchange.request_id
                with exchange.scope:
                    await self._serve(exchange, request, reply)
                if exchange.verdict is None or reply.finished:
                    return
                if reply.started:
                    await reply.break_off(bytes(exchange.verdict.body))
                else:
                    await exchange.verdict(scope, receive, reply.send)
        except RequestRefused as refused:
            await refused.response()(scope, receive, reply.send)

    async def _serve(self, exchange: Exchange, request: Request, reply: Reply) -> None:
        try:
            content = b"" if self._endpoint is None else await self._prepare(self._endpoint, exchange, request)
        except ClientDisconnect:
            return
        except RequestRefused as refused:
            exchange.end(refused.response())
            return

        def client_left() -> None:
            if reply.finished:
                return
            log.info("request %s: the client left: stopping its engines", exchange.request_id)
            exchange.end(None)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(when_disconnected, request.receive, client_left)
            await self._relay(exchange, request, content, reply)
            tasks.cancel_scope.cancel()

    async def _prepare(self, endpoint: Endpoint, exchange: Exchange, request: Request) -> bytes:
        """The body for the decode engine. Once it is sent, tickets for this request are expected."""
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
        exchange.request = parse_client_request(endpoint, body)
        return decode_body(exchange.request, self._settings.metaserver_url)

    async def _relay(self, exchange: Exchange, request: Request, content: bytes, reply: Reply) -> None:
        headers = decode_request_headers(request.headers.raw, exchange.request_id)
        exchange.prefill_headers = prefill_request_headers(headers)
        try:
            async with self._decode.open(
                request.method,
                self._path,
                headers=headers,
                content=content,
                request_id=exchange.request_id,
            ) as answer:
                chunks = answer.aiter_raw()
                # A stream's headers come at once, long before its prompt is prefilled: hold them back, so
                # that a failed prefill can still be answered with its status.
                first = await anext(chunks, b"")
                exchange.answering = True
                await reply.start(answer)
                await reply.write(first)
                async for chunk in chunks:
                    await reply.write(chunk)
                await reply.finish()
        except EngineError as error:
            log.warning("request %s: %s (%s): the client gets %d", exchange.request_id, error, error.url, error.status)
            exchange.end(error_response(error.status, str(error)))
        except TimeoutError:
            log.warning("request %s: the client stopped reading: giving it up", exchange.request_id)
            exchange.end(None)
