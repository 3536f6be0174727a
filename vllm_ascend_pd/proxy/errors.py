# SPDX-License-Identifier: Apache-2.0
"""Errors of the proxy's own, in the shape vLLM gives its errors."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import JSONResponse


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
    """Of an engine's answer, for a reason."""
    return body[:500].decode(errors="replace")


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
