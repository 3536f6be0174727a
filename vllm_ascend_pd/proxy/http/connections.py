# SPDX-License-Identifier: Apache-2.0
"""Clients' connections: uvicorn's, with what it lacks for clients that pipeline requests or speak HTTP/1.0, and what
happens at the limit of connections. There, idle ones are closed for new ones, and `/health` is always answered."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.messages import error_response

HEALTH = "/health"
BEYOND_LIMIT = 32
"""Connections beyond those that requests may take. Their requests get 503, or the answer of `HEALTH`."""
_LOOKS = 16
"""Idle connections that are looked at for one to close."""
_MAX_AHEAD_BYTES = 1024 * 1024
"""Of the next request, while one is answered. A client may send it as soon as it has all bytes of the answer, which is
a moment before the server knows that it has sent them."""


class OpenConnections:
    """The clients' connections. For one too many, the one that has been idle for longest is closed.

    A connection is idle from its beginning or its last answer until the head of a request has arrived. The event loop's
    thread owns it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[HttpConnection] = set()
        self._idle: dict[HttpConnection, None] = {}
        """Those without a request. The one that has been idle for longest comes first."""

    @owned
    def opened(self, connection: HttpConnection) -> None:
        """A new connection. It is closed itself if no other one is idle."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self._most:
            self._close_one(connection)

    @owned
    def begins(self, connection: HttpConnection) -> None:
        """The head of a request has arrived."""
        self._idle.pop(connection, None)

    @owned
    def answered(self, connection: HttpConnection) -> None:
        """All its requests have been answered."""
        if connection in self._open:
            self._idle[connection] = None

    @owned
    def closed(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _close_one(self, newest: HttpConnection) -> None:
        for _ in range(_LOOKS):
            connection = next(iter(self._idle))
            del self._idle[connection]
            if connection.transport.get_write_buffer_size() == 0:
                break
            self._idle[connection] = None  # its client still reads an answer
        else:
            connection = newest
        self.closed(connection)
        connection.transport.close()


class _Pipelined(Exception):
    """A client sends a request before it has the answer to the last one."""


class HttpConnection(HttpToolsProtocol):
    """A client's connection, which `OpenConnections` may close. It serves one request at a time.

    uvicorn stops reading from a client that has sent its next request, and does not notice then that the client leaves.
    This goes on reading. It keeps a little of the next request, and drops what a client pipelines beyond: then the
    connection closes after the answer, and the client sends those requests again (RFC 9112, section 9.3.2).
    """

    def __init__(self, connections: OpenConnections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._connections = connections
        self._ahead = b""
        """Bytes of the next request."""
        self._is_last = False
        """Whether the connection closes after the running request. What arrives is dropped."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn's timer would keep all this in memory after a reset

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        if not self._is_busy or self.cycle.more_body:
            super().data_received(data)
        elif len(self._ahead) + len(data) <= _MAX_AHEAD_BYTES:
            self._ahead += data
        else:
            self._end_after_this()

    def on_message_begin(self) -> None:
        if self._is_busy:
            self._end_after_this()
            raise _Pipelined  # the parser stops
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._connections.begins(self)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _until_closed(self.cycle)  # type: ignore[method-assign, assignment]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ahead and not self.transport.is_closing():
            ahead, self._ahead = self._ahead, b""
            self.data_received(ahead)
        if self.cycle.response_complete:  # no pipelined request follows
            self._connections.answered(self)

    def send_400_response(self, msg: str) -> None:
        if not self._is_last:
            super().send_400_response(msg)

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_after_this(self) -> None:
        self._is_last, self._ahead = True, b""
        self.cycle.keep_alive = False


def _until_closed(cycle: RequestResponseCycle) -> Send:
    """Returns a `send` for answers without a length that ends them with the connection, as HTTP/1.0 does. uvicorn would
    cut them into chunks, which HTTP/1.0 does not know."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_unframed(message: Message) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return send_unframed


class BoundedRequests:
    """ASGI application that answers 503 while `limit` requests are in flight, except for `HEALTH`."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
        elif self._in_flight >= self._limit:
            why = f"{self._limit} connections have a request, which is the limit: retry later"
            refused = error_response(HTTPStatus.SERVICE_UNAVAILABLE, why, headers={"Connection": "close"})
            await refused(scope, receive, send)
        else:
            self._in_flight += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._in_flight -= 1
