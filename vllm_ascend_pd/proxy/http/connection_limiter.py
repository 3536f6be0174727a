# SPDX-License-Identifier: Apache-2.0
"""Bounds what one connection, and all connections together, can hold.

uvicorn itself has no timeout for a request's headers and body, nor for an answer that the client does not read. It also
keeps headers of any length, and any number of requests that a client sends before it has its answer. The classes here
extend uvicorn's protocol for httptools; the event loop's thread owns all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import Counter
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_REQUEST_SECONDS = 20.0
"""For a request's headers, and again for its body."""
_BYTES_PER_SECOND = 64 * 1024
"""Each so many bytes of the body extend its time by a second."""
_LINGER_SECONDS = 2.0
"""For the rest of a body whose request was answered without it, since an answer on a closed connection is lost. Also
for the unsent rest of an answer when the connection is closed."""
_POLL_SECONDS = 1.0
"""Between two checks of a state that ends without an event."""
_MAX_HEAD_BYTES = 64 * 1024
"""Of headers, trailers and everything else that is not body. uvicorn has the same limit where it parses with h11."""
_MAX_AHEAD = 1
"""Requests that a client may send before it has its answer. A client that has read its answer's last byte may send the
next request before the server has ended the first one, but only one."""
_MAX_AHEAD_BYTES = 512 * 1024
"""Of the body of such a request; more than two reads return."""


class _Phase(enum.Enum):
    IDLE = "the last request was answered, and no byte of another one has come"
    HEAD = "the request's headers are incomplete"
    BODY = "the request's body is incomplete"
    ANSWER = "the request is complete, and its answer is not"
    LINGER = "the request was answered before its body was complete"


_WITHOUT_REQUEST = (_Phase.IDLE, _Phase.HEAD)


class ConnectionLimiter:
    """Bounds the number of connections.

    One connection too many closes the one that has had no request for the longest time and has read its answers. If
    there is none, the new one is closed.
    """

    def __init__(self, limit: int, idle: int, unread_timeout: float) -> None:
        """`limit`: connections. `idle`: those of them without a request. `unread_timeout`: seconds that a client may
        leave its answer unread."""
        self.connections = 0
        """Open connections."""
        self.refused: Counter[HTTPStatus] = Counter()
        """Requests refused before the application got them, by status."""
        self.unread_timeout = unread_timeout
        self._limit = limit
        self._idle = idle
        self._without_request: dict[GuardedConnection, None] = {}
        """In the order in which they have had no request; the values mean nothing."""

    @property
    def protocol(self) -> Any:
        """The value for uvicorn's option `http`."""
        return partial(GuardedConnection, self)

    def opened(self) -> None:
        self.connections += 1

    def without_request(self, connection: GuardedConnection) -> None:
        """Records that a connection has no request. May close a connection."""
        self._without_request[connection] = None
        if self.connections > self._limit or len(self._without_request) > self._idle:
            read_all = (each for each in self._without_request if not each.transport.get_write_buffer_size())
            if (longest := next(read_all, None)) is not None:
                longest.refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def with_request(self, connection: GuardedConnection) -> None:
        self._without_request.pop(connection, None)

    def closed(self, connection: GuardedConnection) -> None:
        self.connections -= 1
        self.with_request(connection)


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with timeouts and limits. A single timer enforces the current phase's
    deadline."""

    transport: asyncio.Transport
    cycle: RequestResponseCycle | None  # type: ignore[assignment]  # the last request that came; None at first

    def __init__(self, limiter: ConnectionLimiter, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self._limiter = limiter
        self._phase = _Phase.HEAD
        self._since = 0.0
        """When the phase began, on the event loop's clock."""
        self._received = 0
        """Bytes since the phase began."""
        self._head_bytes = 0
        """Bytes that are not body, since the last body byte or the end of a request."""
        self._unread_since: float | None = None
        """When the client stopped reading its answer; None while it reads."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_counted_out = False
        """Whether the limiter no longer counts this connection; uvicorn may close it a moment later."""
        self._answered: RequestResponseCycle | None = None
        """The request before those in `pipeline`, which is being answered."""

    # uvicorn and the event loop call these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._limiter.opened()
        self._enter(_Phase.HEAD)

    def connection_lost(self, error: Exception | None) -> None:
        if self.pipeline and self._answered is not None:  # uvicorn tells the last request only
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(error)
        self._count_out()
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._head_bytes += len(data)
        super().data_received(data)
        self._update_phase()
        if self._head_bytes > _MAX_HEAD_BYTES:
            self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_AHEAD:
            raise ValueError("too many requests sent ahead")  # uvicorn calls send_400_response
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("no tunnels")
        if self.parser.should_upgrade():
            return  # `decline_upgrade` parses the request again
        before = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            self._answered = before
            self.flow.resume_reading()  # uvicorn stops reading, and would not notice that the client leaves

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)
        if self.pipeline:
            if self.cycle is not None and len(self.cycle.body) > _MAX_AHEAD_BYTES:
                raise ValueError("too much sent ahead")
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_phase()

    def send_400_response(self, message: str) -> None:
        if self._is_answering:
            self.refuse(HTTPStatus.BAD_REQUEST)
            return
        self._limiter.refused[HTTPStatus.BAD_REQUEST] += 1
        super().send_400_response(message)

    def decline_upgrade(self, rest: bytes) -> None:
        """Parses the request again as if it had not asked for another protocol. `rest` follows its headers."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        head = b"\r\n".join([b"%s %s HTTP/%s" % (method, self.url, version), *lines, b"", b""])
        self.parser = _Parser(self)
        self.parser.feed_data(head + rest)

    # What follows is not uvicorn's.

    def refuse(self, status: HTTPStatus) -> None:
        """Closes the connection, with an answer if the client waits for one."""
        if self._is_counted_out:
            return
        self._count_out()
        self._limiter.refused[status] += 1
        # Between two requests the client waits for no answer.
        if self.cycle is None or (self._phase is _Phase.BODY and not self._is_answering):
            self.transport.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
            )
        self.transport.close()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)  # close() waits until all is sent

    @property
    def _is_answering(self) -> bool:
        """Whether bytes that are written now would be part of an answer that has begun."""
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and cycle.response_started and not cycle.response_complete)

    def _count_out(self) -> None:
        if not self._is_counted_out:
            self._is_counted_out = True
            self._limiter.closed(self)
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _update_phase(self) -> None:
        cycle = self.cycle
        if cycle is None:
            phase = _Phase.HEAD
        elif cycle.response_complete:
            phase = _Phase.LINGER if cycle.more_body else self._between_requests()
        else:
            phase = _Phase.BODY if cycle.more_body else _Phase.ANSWER
        if phase is not self._phase and not self._is_counted_out:
            self._enter(phase)

    def _between_requests(self) -> _Phase:
        """uvicorn's own timer closes an idle connection, until the first byte of a request."""
        return _Phase.HEAD if self._received or self.transport.is_closing() else _Phase.IDLE

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._received = 0
        self._stop_timer()
        self._timer = self.loop.call_at(self._deadline(), self._check_deadline)
        if phase in _WITHOUT_REQUEST:
            self._limiter.without_request(self)
        else:
            self._limiter.with_request(self)

    def _deadline(self) -> float:
        """When the connection is closed if nothing changes, or when to look again."""
        now, unread_timeout = self.loop.time(), self._limiter.unread_timeout
        if self._unread_since is not None:  # the application has the same timeout, and logs what it gives up
            return self._unread_since + unread_timeout + _LINGER_SECONDS
        if self._phase is _Phase.ANSWER:
            return self._since if self.transport.is_closing() else now + unread_timeout
        if self._phase is _Phase.LINGER:
            return self._since + _LINGER_SECONDS
        if self._phase in _WITHOUT_REQUEST and self.transport.get_write_buffer_size():
            return min(now + _POLL_SECONDS, self._since + unread_timeout)
        if self._phase is _Phase.IDLE:
            return now + unread_timeout
        # Either the body belongs to a request sent ahead, or uvicorn does not read what the client sends.
        if self._phase is _Phase.BODY and (self.pipeline or self.flow.read_paused):
            return now + _POLL_SECONDS
        extension = self._received / _BYTES_PER_SECOND if self._phase is _Phase.BODY else 0.0
        return self._since + _REQUEST_SECONDS + extension

    def _check_deadline(self) -> None:
        deadline = self._deadline()
        if self.loop.time() < deadline:
            self._timer = self.loop.call_at(deadline, self._check_deadline)
        elif self.transport.get_write_buffer_size():  # the client does not read
            self.transport.abort()
        else:
            self.refuse(HTTPStatus.REQUEST_TIMEOUT)


class _Parser(httptools.HttpRequestParser):
    """Declines other protocols (RFC 9110, section 7.8). httptools reads no body of a request that asks for one, and
    uvicorn, which declines too, would take the body for the next request."""

    def __init__(self, connection: GuardedConnection) -> None:
        super().__init__(connection)
        self._connection = connection
        with contextlib.suppress(AttributeError):  # uvicorn sets this, too; old versions of httptools do not have it
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._connection.decline_upgrade(bytes(data[stopped.args[0] :]))
