# SPDX-License-Identifier: Apache-2.0
"""Checks requests for a bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from vllm_ascend_pd.proxy.http.errors import RequestRefused

Action = Callable[[Request], Awaitable[Response]]


class BearerToken:
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def is_in(self, request: Request) -> bool:
        """The time of the comparison does not depend on where the tokens differ."""
        given = request.headers.get("authorization", "").encode("latin-1")
        return hmac.compare_digest(given, self._expected)


def guarded(token: BearerToken, action: Action) -> Action:
    """An endpoint for operators. It answers 401 without the admin token, and turns RequestRefused into an answer."""

    async def endpoint(request: Request) -> Response:
        try:
            if not token.is_in(request):
                raise RequestRefused(HTTPStatus.UNAUTHORIZED, "the admin token is missing or wrong")
            return await action(request)
        except RequestRefused as refused:
            return refused.response()

    return endpoint
