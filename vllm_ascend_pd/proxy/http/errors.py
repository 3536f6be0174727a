# SPDX-License-Identifier: Apache-2.0
"""Error answers of the proxy, in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse

from vllm_ascend_pd.core.text import one_line

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


def body_too_large(limit: int) -> RequestRefused:
    return RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request body exceeds {limit} bytes")


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
