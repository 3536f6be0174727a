# SPDX-License-Identifier: Apache-2.0
"""Errors of the proxy's own, in the shape vLLM gives its errors."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse

from vllm_ascend_pd.core.text import one_line

_EXCERPT_CHARS = 500


class RequestRefused(Exception):
    """What the sender of a request did wrong, as the HTTP status and message that say so."""

    def __init__(self, status: HTTPStatus, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def response(self) -> JSONResponse:
        return error_response(self.status, self.message, param=self.param)


def excerpt(body: bytes) -> str:
    """Of an engine's answer, for a reason: one line, since reasons are logged."""
    return one_line(body[: 4 * _EXCERPT_CHARS].decode(errors="replace"), _EXCERPT_CHARS)


def error_response(
    status: HTTPStatus,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """`{"error": {...}}` as OpenAI clients expect it; `type` is vLLM's, e.g. `BadRequestError` for 400.
    429 says when to come back."""
    name = status.phrase.replace(" ", "").replace("-", "").removesuffix("Error")
    if status is HTTPStatus.TOO_MANY_REQUESTS:
        headers = {"Retry-After": "1", **(headers or {})}
    error = {"message": message, "type": f"{name}Error", "param": param, "code": status.value}
    return JSONResponse({"error": error}, status_code=status.value, headers=headers)
