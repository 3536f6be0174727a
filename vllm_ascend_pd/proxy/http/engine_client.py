# SPDX-License-Identifier: Apache-2.0
"""HTTP to engines by aiohttp: connections, the time each step may take, and errors that name no address."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import anyio
from aiohttp.http_exceptions import HttpProcessingError

from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.transport.http_session import TimedBody, open_session, time_limits

# What aiohttp would add to a request that has none: a proxy's requests are the client's.
_NOT_ADDED = ("Content-Type", "User-Agent")
# A client that did not ask for compression must not get it.
_NO_COMPRESSION = (b"accept-encoding", b"identity")
_NOT_HTTP = "the answer is not valid HTTP"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class HttpError(Exception):
    """No answer of an engine, or not all of it. Its text is for clients too: it names no address."""

    def __str__(self) -> str:
        reason = super().__str__()
        return f"{type(self).__name__}: {reason}" if reason else type(self).__name__


class ConnectError(HttpError):
    """There is no connection: nothing was sent."""


class ConnectTimeout(HttpError):
    """No connection in time: nothing was sent."""


class PoolTimeout(HttpError):
    """As many requests as there may be were under way all the time: nothing was sent."""


class ReadTimeout(HttpError):
    """The engine was silent for too long."""


class ConnectionLost(HttpError):
    """The engine closed the connection before its answer was complete, or sent something else than HTTP."""


class EngineResponse:
    """An engine's answer whose headers have come. `close` it, whatever happens."""

    def __init__(self, response: aiohttp.ClientResponse, on_close: Callable[[], object]) -> None:
        self._response = response
        self._on_close = on_close
        self._lost: asyncio.Future[None] | None = None
        self._watch()
        self.status = response.status
        self.headers: Headers = list(response.raw_headers)
        """As they came, repeated ones included."""

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    @property
    def may_be_passed_on(self) -> bool:
        """Whether it is one that HTTP knows, and ends by: none that changes the protocol, and no control characters,
        which aiohttp's parser lets through."""
        return 200 <= self.status < 600 and not any(_CONTROL.search(value) for _, value in self.headers)

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_event_stream(self) -> bool:
        return self._response.headers.get("Content-Type", "").startswith("text/event-stream")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, undecoded. Raises HttpError."""
        read = self._response.content.readany
        try:
            while chunk := await read():
                yield chunk
        except _FAILURES as error:
            raise _error(error) from error

    def _watch(self) -> None:
        """Breaks the body off when its connection is lost: of one that stops being HTTP aiohttp tells nobody who reads
        it, and stops its own timer."""
        connection = self._response.connection
        if connection is None or connection.protocol is None:
            return  # the whole answer is here
        self._lost = connection.protocol.closed
        if self._lost is None:
            self._break_off()
            return
        self._lost.remove_done_callback(_heard)  # an earlier answer's on this connection
        self._lost.add_done_callback(_heard)
        self._lost.add_done_callback(self._break_off)

    def _break_off(self, _: object = None) -> None:
        body = self._response.content
        if not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError())

    def close(self) -> None:
        """Once. Closes the connection too, unless the whole answer was read."""
        if self._lost is not None:
            self._lost.remove_done_callback(self._break_off)
        self._response.close()
        self._on_close()


def _heard(lost: asyncio.Future[None]) -> None:
    """Who reads is told why a connection was lost: asyncio is not to log it as an error that nobody saw."""
    if not lost.cancelled():
        lost.exception()


class EngineClient:
    """At most `max_connections` requests at a time. None is sent twice, but for a GET or HEAD: aiohttp repeats those
    when a connection that was idle turns out to be closed."""

    def __init__(
        self, *, max_connections: int, connect_timeout: float, read_timeout: float, reuse_connections: bool = True
    ) -> None:
        """Seconds: `connect_timeout` to open a connection, or to wait until another request has ended; `read_timeout`
        without a byte from the engine, or to send it the request."""
        self._places = anyio.Semaphore(max_connections)
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._timeout = time_limits(connect_timeout, read_timeout)
        self._reuse_connections = reuse_connections
        self._opened: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, headers: Headers, content: bytes = b"", timeout: float | None = None
    ) -> EngineResponse:
        """Sends a request; returns as soon as the answer's headers are there. `timeout`: of each step, instead of the
        client's own. Raises HttpError. Cancelled, it closes the connection."""
        await self._take_place(timeout)
        try:
            response = await self._session().request(
                method,
                url,
                headers=_encoded(headers),
                data=TimedBody(content, self._read_timeout if timeout is None else timeout) if content else None,
                timeout=self._timeout if timeout is None else time_limits(timeout, timeout),
                allow_redirects=False,
            )
            answer = EngineResponse(response, self._places.release)
        except _FAILURES as error:
            self._places.release()
            raise _error(error) from error
        except BaseException:
            self._places.release()
            raise
        if not answer.may_be_passed_on:
            answer.close()
            raise ConnectionLost(_NOT_HTTP)
        return answer

    @asynccontextmanager
    async def get(self, url: str, timeout: float | None = None) -> AsyncIterator[EngineResponse]:
        answer = await self.send("GET", url, [], timeout=timeout)
        try:
            yield answer
        finally:
            answer.close()

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _take_place(self, timeout: float | None) -> None:
        try:
            self._places.acquire_nowait()  # as a rule, and without the cost of a timeout
            return
        except anyio.WouldBlock:
            pass
        try:
            with anyio.fail_after(self._connect_timeout if timeout is None else timeout):
                await self._places.acquire()
        except TimeoutError:
            raise PoolTimeout from None

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:  # it needs a running loop
            self._opened = open_session(not_added=_NOT_ADDED, reuse_connections=self._reuse_connections)
        return self._opened


def _encoded(headers: Headers) -> list[tuple[str, str]]:
    """aiohttp sends text as UTF-8. The rare bytes that are none are sent as if they were latin-1."""
    if not any(name == _NO_COMPRESSION[0] for name, _ in headers):
        headers = [*headers, _NO_COMPRESSION]
    return [(name.decode("ascii"), _text(value)) for name, value in headers]


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


# TimeoutError: from aiohttp's own timers. OSError: from a socket, where aiohttp does not wrap it.
_FAILURES = (aiohttp.ClientError, HttpProcessingError, TimeoutError, asyncio.TimeoutError, OSError)


def _error(cause: BaseException) -> HttpError:
    """In words of our own: those of aiohttp and of asyncio have addresses in them."""
    if isinstance(cause, aiohttp.ConnectionTimeoutError):
        return ConnectTimeout()
    if isinstance(cause, aiohttp.ClientConnectorError):
        return ConnectError(_why_no_connection(cause.os_error))
    if isinstance(cause, (TimeoutError, asyncio.TimeoutError)):
        return ReadTimeout()
    if isinstance(cause, (HttpProcessingError, aiohttp.ClientResponseError)):
        return ConnectionLost(_NOT_HTTP)
    if isinstance(cause, aiohttp.ClientPayloadError):
        return ConnectionLost("the answer broke off")
    if isinstance(cause, aiohttp.ServerDisconnectedError):
        return ConnectionLost("closed without an answer")
    if isinstance(cause, OSError) and cause.errno:
        return ConnectionLost(os.strerror(cause.errno))
    return ConnectionLost("closed")


def _why_no_connection(cause: OSError) -> str:
    if isinstance(cause, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS connection ({cause.reason})"
    return os.strerror(cause.errno) if cause.errno else "no connection"
