# SPDX-License-Identifier: Apache-2.0
"""Bounds what those who connect can take: uvicorn itself waits for ever for a request, of any number of clients."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # httptools is optional
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

# For a request's headers, and for its body: then so many bytes buy a second more.
_PATIENCE_SECONDS = 20.0
_BYTES_PER_SECOND = 64 * 1024
# For the rest of a body that was not wanted: an answer sent into a closed connection is lost.
_LINGER_SECONDS = 2.0
# Headers, trailers and whatever else is no body. uvicorn's own bound where it parses with h11.
_MAX_HEAD_BYTES = 64 * 1024


class _Phase(enum.Enum):
    HEAD = "the request's headers have not come"
    BODY = "its body has not come"
    ANSWER = "it is being answered"
    LINGER = "it was answered without its body"


class Door:
    """At most `limit` connections. A further one takes the place of the one that has longest had no request, its own
    if there is no other. `refused` counts what never came to be an HTTP request, by the status it was refused with."""

    def __init__(self, limit: int) -> None:
        self.refused: Counter[HTTPStatus] = Counter()
        self.connections = 0
        self._limit = limit
        self._without_request: dict[_Guest, None] = {}

    @property
    def protocol(self) -> Any:
        """uvicorn's `http`."""
        return partial(_H11Guest if HttpToolsProtocol is None else _HttpToolsGuest, self)

    def enter(self, guest: _Guest) -> None:
        self.connections += 1
        self.wait(guest)
        if self.connections > self._limit:
            next(iter(self._without_request)).refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def wait(self, guest: _Guest) -> None:
        self._without_request[guest] = None

    def busy(self, guest: _Guest) -> None:
        self._without_request.pop(guest, None)

    def leave(self, guest: _Guest) -> None:
        self.connections -= 1
        self.busy(guest)


class _Guest:
    """A connection: what uvicorn's two protocols need besides. A mixin before either."""

    def __init__(self, door: Door, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._door = door
        self._phase = _Phase.HEAD
        self._since = 0.0
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None
        self._left = False

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    cycle: Any
    flow: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._enter(_Phase.HEAD)
        self._door.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)  # type: ignore[misc]
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)  # type: ignore[misc]
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        self._follow()

    def send_400_response(self, message: str) -> None:
        self._door.refused[HTTPStatus.BAD_REQUEST] += 1
        super().send_400_response(message)  # type: ignore[misc]

    def refuse(self, status: HTTPStatus) -> None:
        if self._left:
            return
        self._leave()
        self._door.refused[status] += 1
        begun = self.cycle is not None and self.cycle.response_started
        if self.cycle is None or (self._phase is _Phase.BODY and not begun):  # between requests: nobody waits for it
            self.transport.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
            )
        self.transport.close()

    def _leave(self) -> None:
        """Counts no more, although uvicorn may take a moment to let it go."""
        if not self._left:
            self._left = True
            self._door.leave(self)
            if self._timer is not None:
                self._timer.cancel()

    def _follow(self) -> None:
        cycle = self.cycle
        if cycle is None:
            phase = _Phase.HEAD
        elif cycle.response_complete:
            phase = _Phase.LINGER if cycle.more_body else _Phase.HEAD
        else:
            phase = _Phase.BODY if cycle.more_body else _Phase.ANSWER
        if phase is not self._phase and not self._left:
            self._enter(phase)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._received = 0
        (self._door.wait if phase is _Phase.HEAD else self._door.busy)(self)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if phase is _Phase.ANSWER else self.loop.call_at(self._deadline(), self._look)

    def _deadline(self) -> float:
        if self._phase is _Phase.LINGER:
            return self._since + _LINGER_SECONDS
        earned = self._received / _BYTES_PER_SECOND if self._phase is _Phase.BODY else 0.0
        return self._since + _PATIENCE_SECONDS + earned

    def _look(self) -> None:
        now, deadline = self.loop.time(), self._deadline()
        if self.flow.read_paused:  # it may be sending: we do not read
            deadline = now + 1.0
        if now < deadline:
            self._timer = self.loop.call_at(deadline, self._look)
        else:
            self.refuse(HTTPStatus.REQUEST_TIMEOUT)


class _H11Guest(_Guest, H11Protocol):
    pass


if HttpToolsProtocol is not None:

    class _HttpToolsGuest(_Guest, HttpToolsProtocol):
        """httptools keeps headers of any length."""

        _head_bytes = 0  # since there was body last

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._head_bytes = 0
            super().on_message_complete()
