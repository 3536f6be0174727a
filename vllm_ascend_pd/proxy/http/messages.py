# SPDX-License-Identifier: Apache-2.0
"""What holds for every HTTP message at the proxy's port: error answers in vLLM's format, bearer tokens, and which
headers pass on (RFC 9110, section 7.6.1)."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.ticket_params import BY_DECODE, BY_PREFILL


class TooLarge(Exception):
    """A body exceeds its limit."""


async def read_body(chunks: AsyncIterable[bytes], limit: int) -> bytearray:
    """Returns the whole body, without a second copy of it. Raises TooLarge as soon as it exceeds `limit` bytes."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise TooLarge
    return body


@contextmanager
def beside(work: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Runs `work` in a task of its own, and cancels it when the `with` block ends. An error of it is logged only.

    A task group takes several times as long, and every request has two.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield
    finally:
        task.cancel()


async def disconnected(receive: Receive) -> None:
    """Returns when the client closes the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


_EXCERPT_CHARS = 500


class RequestRefused(Exception):
    """A request that the proxy refuses, with the HTTP status and message of the answer."""

    def __init__(self, status: HTTPStatus, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def response(self) -> JSONResponse:
        return error_response(self.status, self.message, param=self.param)


def excerpt(body: bytes) -> str:
    """Returns the beginning of an engine's answer as one line, for a reason in the log."""
    return one_line(body[: 4 * _EXCERPT_CHARS].decode(errors="replace"), _EXCERPT_CHARS)


def error_response(
    status: HTTPStatus,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Returns `{"error": {...}}` as OpenAI clients expect it, with vLLM's `type`, such as `BadRequestError` for 400.

    A 429 and a 503 have a Retry-After header.
    """
    name = status.phrase.replace(" ", "").replace("-", "").removesuffix("Error")
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers = {"Retry-After": "1", **(headers or {})}
    error = {"message": message, "type": f"{name}Error", "param": param, "code": status.value}
    return JSONResponse({"error": error}, status_code=status.value, headers=headers)


Action = Callable[[Request], Awaitable[Response]]


def guarded(tokens: Sequence[str], name: str, action: Action) -> Action:
    """An endpoint for those who have one of the bearer tokens `name`. It raises RequestRefused (401) without one."""
    expected = [f"Bearer {token}".encode() for token in tokens]

    async def endpoint(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("latin-1")
        # The time of a comparison does not depend on where the tokens differ.
        if not any(hmac.compare_digest(given, each) for each in expected):
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, f"the {name} is missing or wrong")
        return await action(request)

    return endpoint


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
# uvicorn and the gateway add their own. Which pages may use an engine (CORS) says nothing about this proxy.
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
    """The engine's headers, without those that the proxy sets, and without those of CORS."""
    return _end_to_end(engine, without=_OF_THE_ENGINES_SERVER)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], without: frozenset[bytes]) -> Headers:
    lowered = [(name.lower(), value) for name, value in headers]
    named_by_connection = {
        option.strip().lower() for name, value in lowered if name == b"connection" for option in value.split(b",")
    }
    dropped = _HOP_BY_HOP | without | named_by_connection
    return [(name, value) for name, value in lowered if name not in dropped]
