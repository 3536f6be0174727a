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
from vllm_ascend_pd.proxy.rendezvous.proxied_request import RequestTable
from vllm_ascend_pd.proxy.settings import ProxySettings

_T = TypeVar("_T")


class PostRefused(Exception):
    """What is wrong with a post, as its answer."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        self.answer = error_answer(status, reason)


class PostReader:
    def __init__(self, settings: ProxySettings, request_table: RequestTable) -> None:
        token = settings.metaserver_token()
        self._token = None if token is None else BearerToken(token)
        self._request_table = request_table
        self._read_timeout = settings.read_timeout

    async def read(self, request: Request, limit: int, decode: Callable[[bytes], _T], name: str) -> _T:
        """What `decode` makes of the body, of `limit` bytes at most. Raises PostRefused."""
        if self._token is not None and not self._token.is_in(request):
            reason = "the bearer token is missing or another (metaserver_token_file)"
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


def error_answer(status: HTTPStatus, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=status.value)
