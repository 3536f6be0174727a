# SPDX-License-Identifier: Apache-2.0
"""Bounds what those who connect can take: uvicorn itself waits for ever, for requests and for who does not read, and
keeps all that is sent ahead."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import Counter
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # httptools is optional
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

# For a request's headers, and for its body: then so many bytes buy a second more.
_PATIENCE_SECONDS = 20.0
_BYTES_PER_SECOND = 64 * 1024
# For the rest of a body that was not wanted: an answer sent into a closed connection is lost. And for what a connection
# still has to send when it is closed.
_LINGER_SECONDS = 2.0
# Between two looks at what ends unseen.
_LOOK_SECONDS = 1.0
# Headers, trailers and whatever else is no body. uvicorn's own bound where it parses with h11.
_MAX_HEAD_BYTES = 64 * 1024
# Sent behind a request that has no answer yet. A client that reads the last byte of its answer may ask again before the
# server knows that this was the last one, but only once.
_MAX_AHEAD = 1
_MAX_AHEAD_BYTES = 512 * 1024  # more than two reads bring


class _Phase(enum.Enum):
    IDLE = "it has had an answer, and nothing of another request has come"
    HEAD = "the request's headers have not come"
    BODY = "its body has not come"
    ANSWER = "it is being answered"
    LINGER = "it was answered without its body"


_WITHOUT_REQUEST = (_Phase.IDLE, _Phase.HEAD)


class ConnectionLimiter:
    """At most `limit` connections, at most `idle` of them without a request. A further one takes the place of the one
    that has longest had no request, and has read its answers, its own if there is no other. `refused` counts what never
    came to be an HTTP request, by the status it was refused with."""

    def __init__(self, limit: int, idle: int, patience: float) -> None:
        """`patience`: seconds that a client may leave its answer unread."""
        self.refused: Counter[HTTPStatus] = Counter()
        self.connections = 0
        self.patience = patience
        self._limit = limit
        self._idle = idle
        self._without_request: dict[GuardedConnection, None] = {}

    @property
    def protocol(self) -> Any:
        """uvicorn's `http`."""
        return partial(_GuardedH11 if HttpToolsProtocol is None else _GuardedHttpTools, self)

    def enter(self) -> None:
        self.connections += 1

    def wait(self, connection: GuardedConnection) -> None:
        self._without_request[connection] = None
        if self.connections > self._limit or len(self._without_request) > self._idle:
            idle = (each for each in self._without_request if not each.transport.get_write_buffer_size())
            if (longest := next(idle, None)) is not None:
                longest.refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def busy(self, connection: GuardedConnection) -> None:
        self._without_request.pop(connection, None)

    def leave(self, connection: GuardedConnection) -> None:
        self.connections -= 1
        self.busy(connection)


class GuardedConnection:
    """A connection: what uvicorn's two protocols need besides. A mixin before either."""

    def __init__(self, limiter: ConnectionLimiter, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limiter = limiter
        self._phase = _Phase.HEAD
        self._since = 0.0
        self._received = 0
        self._unread_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._left = False

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    cycle: Any
    flow: Any
    pipeline: Any = ()
    """Requests behind the one that is being answered, where uvicorn keeps them."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._limiter.enter()
        self._enter(_Phase.HEAD)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)  # type: ignore[misc]
        self._leave()
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)  # type: ignore[misc]
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        self._follow()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        self._unread_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()  # type: ignore[misc]
        self._unread_since = None

    def send_400_response(self, message: str) -> None:
        if self._is_answering:
            self.refuse(HTTPStatus.BAD_REQUEST)
            return
        self._limiter.refused[HTTPStatus.BAD_REQUEST] += 1
        super().send_400_response(message)  # type: ignore[misc]

    def refuse(self, status: HTTPStatus) -> None:
        if self._left:
            return
        self._leave()
        self._limiter.refused[status] += 1
        # Between requests nobody waits for it.
        if self.cycle is None or (self._phase is _Phase.BODY and not self._is_answering):
            self.transport.write(
                f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
            )
        self.transport.close()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)  # close() waits until all is sent

    @property
    def _is_answering(self) -> bool:
        """Whether an answer has begun, and has not ended: what is written now is part of it."""
        cycle = self.cycle  # the last one that came
        return bool(self.pipeline) or (cycle is not None and cycle.response_started and not cycle.response_complete)

    def _leave(self) -> None:
        """Counts no more, although uvicorn may take a moment to let it go."""
        if not self._left:
            self._left = True
            self._limiter.leave(self)
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _follow(self) -> None:
        cycle = self.cycle
        if cycle is None:
            phase = _Phase.HEAD
        elif cycle.response_complete:
            phase = _Phase.LINGER if cycle.more_body else self._between_requests()
        else:
            phase = _Phase.BODY if cycle.more_body else _Phase.ANSWER
        if phase is not self._phase and not self._left:
            self._enter(phase)

    def _between_requests(self) -> _Phase:
        """uvicorn's own timer ends an idle connection, until the first byte of a request."""
        return _Phase.HEAD if self._received or self.transport.is_closing() else _Phase.IDLE

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._since = self.loop.time()
        self._received = 0
        self._stop_timer()
        self._timer = self.loop.call_at(self._deadline(), self._look)
        (self._limiter.wait if phase in _WITHOUT_REQUEST else self._limiter.busy)(self)

    def _deadline(self) -> float:
        now, patience = self.loop.time(), self._limiter.patience
        if self._unread_since is not None:  # the application waits as long, and says what it gives up
            return self._unread_since + patience + _LINGER_SECONDS
        if self._phase is _Phase.ANSWER:
            return self._since if self.transport.is_closing() else now + patience
        if self._phase is _Phase.LINGER:
            return self._since + _LINGER_SECONDS
        if self._phase in _WITHOUT_REQUEST and self.transport.get_write_buffer_size():
            return min(now + _LOOK_SECONDS, self._since + patience)
        if self._phase is _Phase.IDLE:
            return now + patience
        # Of a request that comes behind another: its body waits for that. Else it may be sending, and we do not read.
        if self._phase is _Phase.BODY and (self.pipeline or self.flow.read_paused):
            return now + _LOOK_SECONDS
        earned = self._received / _BYTES_PER_SECOND if self._phase is _Phase.BODY else 0.0
        return self._since + _PATIENCE_SECONDS + earned

    def _look(self) -> None:
        deadline = self._deadline()
        if self.loop.time() < deadline:
            self._timer = self.loop.call_at(deadline, self._look)
        elif self.transport.get_write_buffer_size():  # it does not read
            self.transport.abort()
        else:
            self.refuse(HTTPStatus.REQUEST_TIMEOUT)


# Of h11, which does not list the second one as its own: behind a request that offers another protocol.
_HAS_REQUEST = (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined]


class _GuardedH11(GuardedConnection, H11Protocol):
    """Behind a request, uvicorn reads no more: not even that the client has left."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        ahead = len(self.conn.trailing_data[0])
        if ahead > _MAX_AHEAD_BYTES:
            self.refuse(HTTPStatus.BAD_REQUEST)
        elif ahead and self.conn.their_state in _HAS_REQUEST:
            self.flow.resume_reading()


if HttpToolsProtocol is not None:

    class _GuardedHttpTools(GuardedConnection, HttpToolsProtocol):
        """httptools keeps headers of any length, and uvicorn the requests that it has parsed; while it does, it reads
        no more, and of a client that leaves it tells the last request alone."""

        _head_bytes = 0  # since there was body last
        _running: Any = None  # the request before those in `pipeline`

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.parser = _Parser(self)

        def connection_lost(self, error: Exception | None) -> None:
            if self.pipeline:
                self._running.disconnected = True
                self._running.message_event.set()
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

        def on_message_begin(self) -> None:
            if len(self.pipeline) >= _MAX_AHEAD:
                raise ValueError("too many requests sent ahead")  # for uvicorn an invalid one: send_400_response
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("no tunnels")
            if self.parser.should_upgrade():
                return  # it comes again
            before = self.cycle
            super().on_headers_complete()
            if self.pipeline:
                self._running = before
                self.flow.resume_reading()

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)
            if self.pipeline:
                if len(self.cycle.body) > _MAX_AHEAD_BYTES:
                    raise ValueError("too much sent ahead")
                self.flow.resume_reading()

        def on_message_complete(self) -> None:
            if self.parser.should_upgrade():
                return
            self._head_bytes = 0
            super().on_message_complete()

        def decline_offer(self, rest: bytes) -> None:
            """Parses the request whose headers came last once more, as if it had not offered another protocol; `rest`
            came behind them."""
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            head = b"\r\n".join([b"%s %s HTTP/%s" % (method, self.url, version), *lines, b"", b""])
            self.parser = _Parser(self)
            self.parser.feed_data(head + rest)

    class _Parser(httptools.HttpRequestParser):
        """httptools reads no body of a request that offers another protocol, and uvicorn, which declines all offers
        (RFC 9110, section 7.8), would take it for the next request."""

        def __init__(self, connection: _GuardedHttpTools) -> None:
            super().__init__(connection)
            self._connection = connection
            with contextlib.suppress(AttributeError):  # as uvicorn sets it, and where
                self.set_dangerous_leniencies(lenient_data_after_close=True)

        def feed_data(self, data: Any) -> None:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                self._connection.decline_offer(bytes(data[stopped.args[0] :]))
