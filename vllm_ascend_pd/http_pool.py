# SPDX-License-Identifier: Apache-2.0
"""Idle HTTP connections go when they expire, not when the next request comes."""

from __future__ import annotations

import httpx

IDLE_CONNECTION_S = 2.0
"""Servers like vLLM's and the proxy's close a connection that was idle for 5 s. Ours are dropped well before that, so
that a request is hardly ever sent into a connection that is just being closed."""


async def close_expired(transport: httpx.AsyncHTTPTransport) -> None:
    """Call it now and then: httpx looks for expired connections only when it sends a request."""
    for connection in transport._pool.connections:
        if connection.is_idle() and connection.has_expired():
            await connection.aclose()  # closed before anything is awaited: no request can have got it meanwhile
