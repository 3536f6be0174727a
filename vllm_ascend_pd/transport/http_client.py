# SPDX-License-Identifier: Apache-2.0
"""HTTP of decode engines: httpx, set up the same way for all, with bounds for time, answers and connections."""

from __future__ import annotations

import asyncio
import http.cookiejar
import re
import ssl
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import httpcore
import httpx

from vllm_ascend_pd.core.config import TlsConfig
from vllm_ascend_pd.core.hosts import authority, is_host, looks_numeric, normal_host
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.transport.secret_files import read_text_secret

IDLE_CONNECTION_S = 2.0
"""Seconds until an idle connection is closed. Servers like vLLM's close theirs after 5 s. A shorter time here makes it
unlikely that a request is sent on a connection that the server closes at that moment."""
HTTP_FAILURES = (httpx.TransportError, OSError)
"""What a request raises that fails. httpcore lets some of ssl's errors through, which are OSErrors."""
CONNECTION_LOST = (httpx.NetworkError, httpx.RemoteProtocolError, ssl.SSLError)
"""Those of a connection that was closed, reset or never opened, or of a server that does not speak HTTP."""
MAX_URL_CHARS = 2048
_PORTS = {"http": 80, "https": 443}
_MAX_SHOWN_CHARS = 200
# Of one answer: its head, and what a server sends before it. httpcore skips any number of 1xx answers.
_MAX_HEAD_BYTES = 256 << 10


class BrokenAnswerError(OSError):
    """The connection was lost in the middle of an answer."""


class _BoundedStream(httpcore.AsyncNetworkStream):
    """A connection that fails when the server sends over `max_bytes` in answer to one request."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes
        # What the server may still send. A request renews it.
        self._left = max_bytes

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(max_bytes, timeout)
        self._left -= len(data)
        if self._left < 0:
            raise httpcore.RemoteProtocolError("the answer is too long")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._left = self._max_bytes
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _BoundedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._max_bytes)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _BoundedBackend(httpcore.AnyIOBackend):
    """Opens such connections."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        stream = await super().connect_tcp(host, port, timeout, local_address, socket_options)
        return _BoundedStream(stream, self._max_bytes)


class _BoundedTransport(httpx.AsyncHTTPTransport):
    """httpx's transport over such connections. httpx itself cannot be given a backend."""

    def __init__(self, limits: httpx.Limits, ssl_context: ssl.SSLContext, max_bytes: int) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_BoundedBackend(max_bytes),
        )


def open_client(
    limits: httpx.Limits, timeout: httpx.Timeout, max_body_bytes: int, ssl_context: ssl.SSLContext | None = None
) -> httpx.AsyncClient:
    """A client of HTTP/1.1 that follows no redirects, takes nothing from the environment and keeps no cookies.

    `max_body_bytes`: what `read_at_most` takes of an answer. A server that sends far more than that fails the request.
    Without an `ssl_context` it trusts no TLS server.
    """
    trusted = ssl_context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.AsyncClient(
        transport=_BoundedTransport(limits, trusted, _MAX_HEAD_BYTES + max_body_bytes),
        cookies=http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=())),
        follow_redirects=False,
        trust_env=False,
        timeout=timeout,
    )


def tls_context(tls: TlsConfig) -> ssl.SSLContext:
    """Trusts the configured authority, or else the system's.

    Raises SecretFileError, and OSError, of which ssl.SSLError is one.
    """
    context = ssl.create_default_context(cafile=tls.ssl_ca_certs)
    password = tls.ssl_keyfile_password or ""
    if tls.ssl_keyfile_password_file is not None:
        password = read_text_secret(tls.ssl_keyfile_password_file)
    if tls.ssl_certfile is not None:
        # A function: without one, a key that has a password would ask for it on the terminal.
        context.load_cert_chain(tls.ssl_certfile, tls.ssl_keyfile, lambda: password)
    return context


async def read_at_most(response: httpx.Response, max_bytes: int) -> bytes:
    """Returns the response's body, or its first `max_bytes` bytes if it is longer. Never decompresses it.

    Raises BrokenAnswerError.
    """
    body = bytearray()
    try:
        async for piece in response.aiter_raw():
            body += piece
            if len(body) >= max_bytes:
                break
    except CONNECTION_LOST as error:
        raise BrokenAnswerError(str(error)) from error
    return bytes(body[:max_bytes])


class Connections:
    """Posts to HTTP servers. The thread of one event loop owns it. The caller bounds the posts at a time.

    httpcore looks at all connections of a pool, several times, for each request and each answer: at 256 connections
    that takes 15 ms. So each connection has a client, and a pool, of its own. It is reused while it is young.
    """

    def __init__(self, timeout: httpx.Timeout, ssl_context: ssl.SSLContext) -> None:
        self._timeout, self._ssl_context = timeout, ssl_context
        self._idle: deque[tuple[float, httpx.AsyncClient]] = deque()  # with the times of their last use, latest last

    async def post(
        self, url: httpx.URL, headers: Mapping[str, str], content: bytes, max_bytes: int
    ) -> tuple[int, bytes]:
        """Returns status and body of the answer, at most the first `max_bytes` of it. Raises `HTTP_FAILURES`.

        `headers`: beside those that HTTP needs.
        """
        # Not the client's own `stream`, which takes a fifth more CPU time.
        request = httpx.Request("POST", url, headers=headers, content=content)
        if self._idle:
            _, client = self._idle.pop()
        else:
            limits = httpx.Limits(max_connections=1, keepalive_expiry=IDLE_CONNECTION_S)
            client = open_client(limits, self._timeout, max_bytes, self._ssl_context)
        try:
            response = await client.send(request, auth=None, stream=True)
            try:
                body = await read_at_most(response, max_bytes)
            finally:
                await response.aclose()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await client.aclose()  # in whatever state its connection is
            raise
        self._idle.append((time.monotonic(), client))
        return response.status_code, body

    async def close_idle(self) -> None:
        """Closes connections that were not used for `IDLE_CONNECTION_S`, until it is cancelled."""
        while True:
            await asyncio.sleep(IDLE_CONNECTION_S)
            while self._idle and self._idle[0][0] < time.monotonic() - IDLE_CONNECTION_S:
                await self._idle.popleft()[1].aclose()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop()[1].aclose()


def innermost(error: BaseException) -> BaseException:
    """Returns the error that an error of httpx comes from. httpx itself only names the kind of failure."""
    while (cause := error.__cause__ or error.__context__) is not None:  # httpcore raises some `from None`
        error = cause
    return error


def describe(error: BaseException) -> str:
    """Returns what failed as one short line."""
    return clean(str(innermost(error))) or clean(str(error)) or type(error).__name__


def clean(text: str) -> str:
    """Returns text from another process as one short printable line."""
    return one_line(text, _MAX_SHOWN_CHARS)


@dataclass(frozen=True)
class HttpUrl:
    """An HTTP URL without user, query and fragment."""

    url: httpx.URL
    """What to connect to."""
    scheme: str
    """`http` or `https`."""
    host: str
    """In normal form, without brackets."""
    port: int
    """The scheme's own if the URL has none."""
    path: str
    """Without `.` and `..`. Empty if nothing follows the host."""


def parse_url(text: str) -> HttpUrl:
    """Parses a URL that a client names, by the parser that connects.

    Raises ValueError with the reason, for spellings that parsers read in different ways, too.
    """
    if len(text) > MAX_URL_CHARS:
        raise ValueError(f"longer than {MAX_URL_CHARS} characters")
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError("contains spaces, control or non-ASCII characters")
    for character in "@#?%\\":
        if character in text:
            raise ValueError(f"contains {character!r}")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"not a URL: {error}") from error
    if url.scheme not in _PORTS:
        raise ValueError("not http or https")
    host = url.raw_host.decode("ascii").lower()
    if not is_host(host) or looks_numeric(host):
        raise ValueError("its host is neither an address nor a name")
    port = _PORTS[url.scheme] if url.port is None else url.port
    if not 0 < port < 65536:
        raise ValueError(f"port {port} does not exist")
    written, slash, _ = text.partition("://")[2].lower().partition("/")
    # httpx reads `[::1]8000`, `host:8_0` and `host:`, too.
    if authority(host, port) not in (written, f"{written}:{port}"):
        raise ValueError("its host and port are not written as HOST or HOST:PORT")
    return HttpUrl(url, url.scheme, normal_host(host), port, url.raw_path.decode("ascii") if slash else "")
