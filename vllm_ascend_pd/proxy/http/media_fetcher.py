# SPDX-License-Identifier: Apache-2.0
"""Fetches the images, sounds and videos of a prompt once, so that neither engine fetches them.

Without this, decode fetches each of them, and prefill fetches it again: twice the traffic and the wait, and a failed
request if the second answer differs. Only hosts that the operator names are asked. Media of other hosts are left to
the engines.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Collection
from http import HTTPStatus

import aiohttp
import anyio
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from vllm_ascend_pd import __version__
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.client_json import bad_request
from vllm_ascend_pd.proxy.http.errors import RequestRefused
from vllm_ascend_pd.proxy.http.media_urls import replace_media_urls
from vllm_ascend_pd.transport.http_session import open_session, time_limits

ALL_HOSTS = "*"
_MAX_URLS = 256
"""In one request."""
_AT_A_TIME = 64
"""Of all requests together."""
_MAX_REDIRECTS = 5
_URL_CHARS = 200
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": f"vllm-ascend-pd/{__version__}"}


class MediaFetcher:
    """Replaces URLs of media in requests by their content. The event loop's thread owns it."""

    def __init__(self, hosts: Collection[str], timeout: float, max_body_bytes: int) -> None:
        """
        Args:
            hosts: names or addresses that may be asked, redirects included; `*`: all. Empty: nothing is fetched.
            timeout: seconds for one image, sound or video, with all its redirects.
            max_body_bytes: limit of a request's body after the replacement.
        """
        self._hosts = frozenset(host.lower() for host in hosts)
        self._timeout = timeout
        self._max_body_bytes = max_body_bytes
        self._places = anyio.Semaphore(_AT_A_TIME)
        self._opened: aiohttp.ClientSession | None = None

    async def fetch_into(self, body: bytes, field: str) -> bytes:
        """Returns `body` with data URLs in place of the URLs in its field `field`, each fetched once.

        Raises RequestRefused: 400 or 413 if there are too many or too large ones, 422 if a host refuses one, 502 if it
        does not answer.
        """
        if not self._hosts:
            return body
        wanted: dict[str, str] = {}

        def note(url: str) -> None:
            if self._is_allowed(url):
                wanted[url] = ""

        replace_media_urls(body, field, note)
        if not wanted:
            return body
        if len(wanted) > _MAX_URLS:
            raise bad_request(f"{len(wanted)} images, sounds and videos in one request, at most {_MAX_URLS}", field)
        room = _Room(self._max_body_bytes - len(body))
        refusals: list[RequestRefused] = []

        async def fetch(url: str) -> None:
            try:
                wanted[url] = await self._fetch(url, room)
            except RequestRefused as refused:
                refusals.append(refused)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for url in wanted:
                tasks.start_soon(fetch, url)
        if refusals:
            raise refusals[0]
        return replace_media_urls(body, field, wanted.get)

    async def aclose(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def _is_allowed(self, url: str) -> bool:
        try:
            parsed = URL(url)
        except ValueError:
            return False
        return parsed.scheme in ("http", "https") and (
            ALL_HOSTS in self._hosts or (parsed.host or "").lower() in self._hosts
        )

    async def _fetch(self, url: str, room: _Room) -> str:
        """Returns the content as a data URL. Raises RequestRefused."""
        named = one_line(url, _URL_CHARS)
        try:
            with anyio.fail_after(self._timeout):
                async with self._places:
                    return await self._follow(url, named, room)
        except TimeoutError:
            raise _failed(named, f"it took more than {self._timeout:g} s") from None
        except (aiohttp.ClientError, HttpProcessingError, ssl.SSLError, OSError, ValueError) as error:
            raise _failed(named, type(error).__name__) from None

    async def _follow(self, url: str, named: str, room: _Room) -> str:
        limits = time_limits(self._timeout, self._timeout)
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._session().get(url, allow_redirects=False, timeout=limits) as response:
                if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                    url = str(response.url.join(URL(response.headers["Location"])))
                    if not self._is_allowed(url):
                        raise _refused(named, "it redirects to a host that is not one of --media-hosts")
                    continue
                if response.status != HTTPStatus.OK:
                    if response.status < 500 and response.status not in (408, 429):
                        raise _refused(named, f"HTTP {response.status}")
                    raise _failed(named, f"HTTP {response.status}")
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise _failed(named, "its host compresses it unasked")
                content = bytearray()
                while chunk := await response.content.readany():
                    room.take(len(chunk))
                    content += chunk
                return await asyncio.to_thread(_data_url, content)
        raise _refused(named, f"more than {_MAX_REDIRECTS} redirects")

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:  # it needs a running loop
            self._opened = open_session(headers=_HEADERS)
        return self._opened


class _Room:
    """How many bytes of media one request still may have. In base64, 3 bytes take 4."""

    def __init__(self, body_bytes: int) -> None:
        self._left = body_bytes // 4 * 3

    def take(self, size: int) -> None:
        """Raises RequestRefused (413)."""
        self._left -= size
        if self._left < 0:
            raise RequestRefused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "with its images, sounds and videos the request is larger than --max-body-mib",
            )


def _data_url(content: bytearray) -> str:
    # vLLM looks at the content, not at the type, except that video/jpeg means frames.
    return "data:application/octet-stream;base64," + base64.b64encode(content).decode()


def _refused(url: str, reason: str) -> RequestRefused:
    return RequestRefused(HTTPStatus.UNPROCESSABLE_ENTITY, f"the proxy cannot fetch {url}: {reason}")


def _failed(url: str, reason: str) -> RequestRefused:
    return RequestRefused(HTTPStatus.BAD_GATEWAY, f"the proxy cannot fetch {url}: {reason}")
