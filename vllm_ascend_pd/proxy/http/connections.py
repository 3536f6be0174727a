# SPDX-License-Identifier: Apache-2.0
"""What happens at the limit of connections: idle ones are closed for new ones, and `/health` is always answered."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.messages import error_response
from vllm_ascend_pd.proxy.http.sequential_connection import SequentialConnection

HEALTH = "/health"
BEYOND_LIMIT = 32
"""Connections beyond those that requests may take. Their requests get 503, or the answer of `HEALTH`."""
_LOOKS = 16
"""Idle connections that are looked at for one to close."""


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


class HttpConnection(SequentialConnection):
    """A client's connection, which `OpenConnections` may close."""

    def __init__(self, connections: OpenConnections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._connections = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self._connections.begins(self)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no pipelined request follows
            self._connections.answered(self)


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
