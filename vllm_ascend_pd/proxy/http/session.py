# SPDX-License-Identifier: Apache-2.0
"""HTTP sessions of the proxy and the doctor: aiohttp, set up the same way for all."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Mapping, Sequence

import aiohttp
from aiohttp.abc import AbstractStreamWriter

from vllm_ascend_pd.transport.http_client import IDLE_CONNECTION_S

_MAX_HEADER_BYTES = 64 * 1024
"""Of one header, or of the status line, in a response."""


class NotSent(TimeoutError):
    """The server did not read the request's body in time."""


class TimedBody(aiohttp.BytesPayload):
    """A request body that must be sent within `timeout` seconds. aiohttp itself waits for ever."""

    def __init__(self, content: bytes, timeout: float) -> None:
        super().__init__(content)
        self._timeout = timeout

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Raises NotSent."""
        try:
            async with asyncio.timeout(self._timeout):
                await super().write_with_length(writer, content_length)
        except TimeoutError:
            raise NotSent from None


class _Response(aiohttp.ClientResponse):
    def close(self) -> None:
        """Closes the connection at once. aiohttp would first wait until the server has read the whole request."""
        if self.connection is not None and self.connection.transport is not None:
            self.connection.transport.abort()
        super().close()


def open_session(
    *,
    headers: Mapping[str, str] | None = None,
    not_added: Sequence[str] = (),
    ssl_context: ssl.SSLContext | None = None,
    reuse_connections: bool = True,
) -> aiohttp.ClientSession:
    """A session without a limit of connections: the caller bounds its requests. Call it on the event loop that uses it.

    `headers` go with every request. `not_added`: headers that aiohttp would add on its own. The session takes no
    proxies or passwords from the environment and keeps no cookies."""
    connector = aiohttp.TCPConnector(
        limit=0,
        ssl=True if ssl_context is None else ssl_context,
        force_close=not reuse_connections,
        keepalive_timeout=IDLE_CONNECTION_S if reuse_connections else None,
        resolver=aiohttp.ThreadedResolver(),
        use_dns_cache=False,
    )
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        response_class=_Response,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=not_added,
        auto_decompress=False,
        trust_env=False,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
    )


def time_limits(connect: float | None, read: float | None) -> aiohttp.ClientTimeout:
    """Seconds to open a connection, and without a byte from the server. None: no limit."""
    return aiohttp.ClientTimeout(connect=connect, sock_read=read, ceil_threshold=math.inf)
