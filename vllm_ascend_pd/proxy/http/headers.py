# SPDX-License-Identifier: Apache-2.0
"""Which HTTP headers a proxy may pass on (RFC 9110, section 7.6.1), and which it answers for itself."""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The proxy writes a new body, under its own request id, on a connection of its own.
_OF_THE_CLIENTS_MESSAGE = frozenset({b"host", b"content-length", b"content-encoding", b"expect", REQUEST_ID})
# Meant for the engine that answers the client: P's answer never leaves the proxy, and P has its own ranks.
_ONLY_FOR_DECODE = frozenset({b"accept-encoding", b"content-type", b"x-data-parallel-rank"})
# uvicorn adds its own; and other origins are the proxy's to allow.
_OF_THE_ENGINES_SERVER = frozenset(
    {
        b"date",
        b"server",
        REQUEST_ID,
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-expose-headers",
    }
)


def decode_request_headers(client: Iterable[tuple[bytes, bytes]], request_id: str) -> Headers:
    """The client's end-to-end headers, Authorization among them, under the proxy's request id. The body's type is the
    client's: an engine refuses what is not said to be JSON."""
    headers = _end_to_end(client, without=_OF_THE_CLIENTS_MESSAGE)
    return [*headers, (REQUEST_ID, request_id.encode())]


def prefill_request_headers(decode_headers: Headers) -> Headers:
    kept = [(name, value) for name, value in decode_headers if name not in _ONLY_FOR_DECODE]
    return [*kept, (b"content-type", b"application/json")]


def client_response_headers(engine: Iterable[tuple[bytes, bytes]]) -> Headers:
    return _end_to_end(engine, without=_OF_THE_ENGINES_SERVER)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], without: frozenset[bytes]) -> Headers:
    lowered = [(name.lower(), value) for name, value in headers]
    named_by_connection = {
        option.strip().lower() for name, value in lowered if name == b"connection" for option in value.split(b",")
    }
    dropped = _HOP_BY_HOP | without | named_by_connection
    return [(name, value) for name, value in lowered if name not in dropped]
