# SPDX-License-Identifier: Apache-2.0
"""Selects the HTTP headers that the proxy passes on (RFC 9110, section 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from vllm_ascend_pd.core.ticket import BY_DECODE, BY_PREFILL
from vllm_ascend_pd.proxy.http.errors import RequestRefused

Headers = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"
_WHO_COMPUTES = b"x-who-computes"

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
# The proxy's request has its own body, request id and connection. Its body says who computes.
_OF_THE_CLIENTS_MESSAGE = frozenset(
    {b"host", b"content-length", b"content-encoding", b"expect", REQUEST_ID, _WHO_COMPUTES}
)
# For the engine that answers the client. Prefill's answer never leaves the proxy, and prefill has its own ranks.
_ONLY_FOR_DECODE = frozenset({b"accept-encoding", b"content-type", b"x-data-parallel-rank"})
# uvicorn and the proxy's CORS settings add their own.
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
    """The client's end-to-end headers, Authorization included, with the proxy's request id. The content type stays the
    client's, because an engine refuses any other than JSON."""
    headers = _end_to_end(client, without=_OF_THE_CLIENTS_MESSAGE)
    return [*headers, (REQUEST_ID, request_id.encode())]


def who_computes(client: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Who is to compute a request's prompts, by its header `X-Who-Computes`: `BY_DECODE`, `BY_PREFILL`, or None.

    The header may be repeated, or list its value several times, as long as all values are the same. Raises
    RequestRefused (400) for any other value.
    """
    lines = [value for name, value in client if name.lower() == _WHO_COMPUTES]
    if not lines:
        return None
    values = {each.strip().lower().decode("latin-1") for each in b",".join(lines).split(b",")}
    if len(values) == 1 and (value := values.pop()) in (BY_DECODE, BY_PREFILL):
        return value
    raise RequestRefused(HTTPStatus.BAD_REQUEST, "the header X-Who-Computes must be either decode or prefill")


def prefill_request_headers(decode_headers: Headers) -> Headers:
    kept = [(name, value) for name, value in decode_headers if name not in _ONLY_FOR_DECODE]
    return [*kept, (b"content-type", b"application/json")]


def client_response_headers(engine: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The engine's headers, without those that the proxy sets. The CORS headers are such, and `Origin` in `Vary`."""
    headers = _end_to_end(engine, without=_OF_THE_ENGINES_SERVER)
    headers = [(name, _without_origin(value) if name == b"vary" else value) for name, value in headers]
    return [(name, value) for name, value in headers if value or name != b"vary"]


def _without_origin(vary: bytes) -> bytes:
    names = (each.strip() for each in vary.split(b","))
    return b", ".join(each for each in names if each.lower() != b"origin")


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], without: frozenset[bytes]) -> Headers:
    lowered = [(name.lower(), value) for name, value in headers]
    named_by_connection = {
        option.strip().lower() for name, value in lowered if name == b"connection" for option in value.split(b",")
    }
    dropped = _HOP_BY_HOP | without | named_by_connection
    return [(name, value) for name, value in lowered if name not in dropped]
