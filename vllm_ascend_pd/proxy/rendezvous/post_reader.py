# SPDX-License-Identifier: Apache-2.0
"""Reads what decode engines post to the metaserver, and refuses what cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.proxy.http.bearer import BearerToken
from vllm_ascend_pd.proxy.http.errors import RequestRefused
from vllm_ascend_pd.proxy.http.streams import TooLarge, read_all
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable, TicketMatch

_T = TypeVar("_T")


class PostRefused(Exception):
    """A post that cannot be used. `answer` tells the decode engine why."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        self.answer = error_answer(status, reason)


class PostReader:
    """Checks the bearer token of a post, reads its body within a time and size limit, and decodes it."""

    def __init__(self, request_table: RequestTable, *, token: str | None, read_timeout: float) -> None:
        """`token`: None if posts need none. `read_timeout`: seconds for a post to arrive."""
        self._request_table = request_table
        self._token = None if token is None else BearerToken(token)
        self._read_timeout = read_timeout

    async def read(self, request: Request, limit: int, decode: Callable[[bytes], _T], name: str) -> _T:
        """Returns the decoded body.

        Args:
            request: the post.
            limit: bytes of the body.
            decode: decodes the body. Raises one of `UNREADABLE`.
            name: what the post is called in errors.

        Raises:
            PostRefused: 401 without the token, 400 for a body that cannot be read, 503 if the proxy shuts down.
        """
        if self._token is not None and not self._token.is_in(request):
            reason = "the bearer token is missing or wrong (metaserver_token_file)"
            raise PostRefused(HTTPStatus.UNAUTHORIZED, reason)
        try:
            with self._request_table.until_shut_down(), anyio.fail_after(self._read_timeout):
                body = await read_all(request.stream(), limit)
            return decode(body)
        except RequestRefused as refused:
            raise PostRefused(refused.status, refused.message) from None
        except TooLarge:
            raise PostRefused(HTTPStatus.BAD_REQUEST, f"the {name} exceeds {limit} bytes") from None
        except (TimeoutError, ClientDisconnect):
            raise PostRefused(HTTPStatus.BAD_REQUEST, f"the {name} did not arrive") from None
        except UNREADABLE as error:
            raise PostRefused(HTTPStatus.BAD_REQUEST, f"not a {name}: {error}") from None

    def find(self, engine_request_id: str) -> TicketMatch:
        """Finds the request that a post is about. Raises PostRefused (404) if there is none."""
        try:
            return self._request_table.find(engine_request_id)
        except LookupError:
            raise PostRefused(HTTPStatus.NOT_FOUND, "no request is waiting under this request_id") from None


def error_answer(status: HTTPStatus, reason: str) -> JSONResponse:
    """The metaserver's shape of errors, `{"error": reason}`."""
    return JSONResponse({"error": reason}, status_code=status.value)
