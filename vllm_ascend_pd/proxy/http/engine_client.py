# SPDX-License-Identifier: Apache-2.0
"""HTTP requests to engines: bounds on time, and errors without addresses."""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractResolver, AbstractStreamWriter, ResolveResult
from aiohttp.http_exceptions import HttpProcessingError

from vllm_ascend_pd.proxy.http.bodies import Content
from vllm_ascend_pd.proxy.http.messages import Headers, TooLarge
from vllm_ascend_pd.transport.http_client import IDLE_CONNECTION_S
from vllm_ascend_pd.transport.names import HostNames

_NOT_ADDED = ("Content-Type", "User-Agent")
"""Headers that aiohttp would add. The proxy passes on the client's headers only."""
_MAX_HEADER_BYTES = 64 * 1024
"""Of one header, or of the status line, in a response."""
_NO_COMPRESSION = (b"accept-encoding", b"identity")
"""For a client that did not ask for compression."""
_NOT_HTTP = "the answer is not valid HTTP"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


_FOR_ANOTHER_HOST = (62, 64)
"""OpenSSL's codes (X509_V_ERR_..._MISMATCH) whose words have the host's name in them."""


class HttpError(Exception):
    """An engine gave no answer, or not all of it. The text names no address, so clients may read it."""

    def __str__(self) -> str:
        reason = super().__str__()
        return f"{type(self).__name__}: {reason}" if reason else type(self).__name__


class ConnectError(HttpError):
    """The connection failed. Nothing was sent."""


class ConnectTimeout(HttpError):
    """The connection took too long. Nothing was sent."""


class ReadTimeout(HttpError):
    """The engine sent nothing for too long."""


class ConnectionLost(HttpError):
    """The engine closed the connection before its answer was complete, or sent bytes that are not HTTP."""


class EngineResponse:
    """An engine's answer after its headers. Call `close` in any case."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._body: bytes | None = None
        """What `buffer` has read and `read` has not returned since. None: `buffer` was not called."""
        self._lost: asyncio.Future[None] | None = None
        self._watch()
        self.status = response.status
        self.is_success = 200 <= self.status < 300
        self.headers: Headers = list(response.raw_headers)
        """As the engine sent them, repeated ones included."""
        self.content_type: str | None = response.headers.get("Content-Type")
        self.is_event_stream = (self.content_type or "").startswith("text/event-stream")
        self.is_encoded = "Content-Encoding" in response.headers
        """Whether its body is compressed, for instance."""

    async def read(self) -> bytes:
        """Returns the next part of the body, as the engine sends it; empty at its end. Raises HttpError."""
        if self._body is not None:
            body, self._body = self._body, b""
            return body
        try:
            return await self._response.content.readany()
        except _FAILURES as error:
            raise _error(error) from error

    async def buffer(self, limit: int) -> bytes:
        """Reads the whole body, which `read` then returns again, also after `close`. Raises HttpError, and TooLarge as
        soon as it exceeds `limit` bytes."""
        body = bytearray()
        while part := await self.read():
            body += part
            if len(body) > limit:
                raise TooLarge
        self._body = bytes(body)
        return self._body

    def _watch(self) -> None:
        """Ends the body when its connection is lost. If the bytes stop being HTTP, aiohttp closes the connection, stops
        its timer, and leaves the reader of the body waiting."""
        connection = self._response.connection
        if connection is None or connection.protocol is None:
            return  # the whole answer is here
        self._lost = connection.protocol.closed
        if self._lost is None:
            self._break_off()
            return
        self._lost.remove_done_callback(_heard)  # added for an earlier answer on this connection
        self._lost.add_done_callback(_heard)
        self._lost.add_done_callback(self._break_off)

    def _break_off(self, _: object = None) -> None:
        body = self._response.content
        if not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError())

    def close(self) -> None:
        """Closes the connection too, unless the whole answer was read."""
        if self._lost is not None:
            self._lost.remove_done_callback(self._break_off)
        self._response.close()


def _heard(lost: asyncio.Future[None]) -> None:
    """Retrieves the exception. Otherwise asyncio logs it, although the reader of the body gets it, too."""
    if not lost.cancelled():
        lost.exception()


class EngineClient:
    """Sends any number of requests at a time: its users bound them. aiohttp repeats a GET or HEAD if its connection was
    idle and turns out to be closed. Other requests are never sent twice."""

    def __init__(
        self, host_names: HostNames, *, connect_timeout: float, read_timeout: float, reuse_connections: bool = True
    ) -> None:
        """`connect_timeout`: seconds to open a connection. `read_timeout`: seconds without a byte from the engine, or
        to send the request."""
        self._host_names = host_names
        self._read_timeout = read_timeout
        self._timeout = _time_limits(connect_timeout, read_timeout)
        self._reuse_connections = reuse_connections
        self._opened: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, headers: Headers, content: Content | None = None, timeout: float | None = None
    ) -> EngineResponse:
        """Sends a request and returns after the answer's headers. `timeout` replaces both of the client's timeouts.
        Raises HttpError. If it is cancelled, it closes the connection."""
        body: _TimedBody | None = None
        if content is not None and content.size:
            body = _TimedBody(content, self._read_timeout if timeout is None else timeout)
        try:
            response = await self._session().request(
                method,
                url,
                headers=_encoded(headers),
                data=body,
                timeout=self._timeout if timeout is None else _time_limits(timeout, timeout),
                allow_redirects=False,
            )
        except _FAILURES as error:
            raise _error(error) from error
        answer = EngineResponse(response)
        # aiohttp accepts other statuses, and control characters in headers.
        if not 200 <= answer.status < 600 or any(_CONTROL.search(value) for _, value in answer.headers):
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

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:  # it needs a running loop
            self._opened = _open_session(self._host_names, self._reuse_connections)
        return self._opened


class _TimedBody(aiohttp.Payload):
    """A request body that must be sent within `timeout` seconds. aiohttp itself waits for ever.

    It is written in pieces, each when the one before has left: a connection never holds a copy of the whole.
    """

    _value: Content
    _autoclose = True

    def __init__(self, content: Content, timeout: float) -> None:
        super().__init__(content)
        self._size = content.size
        self._timeout = timeout

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Raises TimeoutError if the engine does not read the body in time."""
        async with asyncio.timeout(self._timeout):
            for chunk in self._value.chunks():
                await writer.write(chunk)


class _Response(aiohttp.ClientResponse):
    def close(self) -> None:
        """Closes the connection at once. aiohttp would first wait until the server has read the whole request."""
        if self.connection is not None and self.connection.transport is not None:
            self.connection.transport.abort()
        super().close()


class _Resolver(AbstractResolver):
    def __init__(self, host_names: HostNames) -> None:
        self._host_names = host_names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises OSError."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._host_names.addresses(host)
        ]

    async def close(self) -> None:
        pass


def _open_session(host_names: HostNames, reuse_connections: bool) -> aiohttp.ClientSession:
    """A session without a limit of connections. It takes no proxies or passwords from the environment and keeps no
    cookies."""
    connector = aiohttp.TCPConnector(
        limit=0,
        force_close=not reuse_connections,
        keepalive_timeout=IDLE_CONNECTION_S if reuse_connections else None,
        resolver=_Resolver(host_names),
        use_dns_cache=False,
    )
    return aiohttp.ClientSession(
        connector=connector,
        response_class=_Response,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_NOT_ADDED,
        auto_decompress=False,
        trust_env=False,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
    )


def _time_limits(connect: float, read: float) -> aiohttp.ClientTimeout:
    """Seconds to open a connection, and without a byte from the engine."""
    return aiohttp.ClientTimeout(connect=connect, sock_read=read, ceil_threshold=math.inf)


def _encoded(headers: Headers) -> list[tuple[str, str]]:
    """aiohttp sends text as UTF-8. The rare values that are not UTF-8 are read as latin-1."""
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
    """The texts of aiohttp's and asyncio's errors contain addresses, so they are replaced."""
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
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = "it is for another host" if cause.verify_code in _FOR_ANOTHER_HOST else cause.verify_message
        return f"no TLS connection: its certificate is not trusted (SSL_CERT_FILE): {why}"
    if isinstance(cause, ssl.SSLError):
        return f"no TLS connection ({cause.reason})"
    return os.strerror(cause.errno) if cause.errno else "no connection"
