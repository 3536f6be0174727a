# SPDX-License-Identifier: Apache-2.0
"""The engines of one role: which one gets a request, and HTTP to it with every wait bounded."""

from __future__ import annotations

import enum
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Protocol

import httpx

from .headers import Headers

log = logging.getLogger(__name__)

# vLLM's server closes a connection that was idle for 5 s. Ours are dropped well before that, so a request is
# not sent into a connection that is just being closed.
_KEEPALIVE_SECONDS = 2.0


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class EngineError(Exception):
    """An engine that could not be reached, broke off or stayed silent. The message names no address."""

    def __init__(self, role: Role, url: str, cause: httpx.HTTPError) -> None:
        self.url = url
        silent = isinstance(cause, httpx.TimeoutException) and not isinstance(cause, httpx.ConnectTimeout)
        self.status = HTTPStatus.GATEWAY_TIMEOUT if silent else HTTPStatus.BAD_GATEWAY
        super().__init__(f"{role.value} engine: {describe(cause)}")


class Balancer(Protocol):
    """Decides which engine serves a request."""

    def order(self) -> Sequence[str]:
        """Engine URLs for the next request, best first; later ones are tried if earlier refuse to connect."""


class RoundRobin:
    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)
        self._next = 0

    def order(self) -> Sequence[str]:
        first = self._next
        self._next = (first + 1) % len(self._urls)
        return self._urls[first:] + self._urls[:first]


class EnginePool:
    def __init__(
        self,
        role: Role,
        urls: Sequence[str],
        *,
        max_connections: int,
        connect_timeout: float,
        read_timeout: float,
    ) -> None:
        self.role = role
        self.urls = tuple(urls)
        self._balancer: Balancer = RoundRobin(self.urls)
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(
                max_connections=max_connections,
                max_keepalive_connections=max_connections,
                keepalive_expiry=_KEEPALIVE_SECONDS,
            ),
            timeout=httpx.Timeout(read_timeout, connect=connect_timeout, pool=connect_timeout),
            # A client that did not ask for compression must not get it.
            headers={"Accept-Encoding": "identity"},
            # Engines are reached directly, whatever HTTP_PROXY or ~/.netrc say.
            trust_env=False,
        )

    @asynccontextmanager
    async def open(
        self, method: str, path: str, *, headers: Headers, content: bytes = b"", request_id: str
    ) -> AsyncIterator[httpx.Response]:
        """Sends the request; yields the response as soon as its headers are there, its body still unread.

        An engine that cannot be connected to is replaced by the next one. Once anything may have been sent
        there is no second try: the engine may be working on it. Raises EngineError, also for what goes wrong
        while the body is read inside the `async with`.
        """
        url, response = await self._send(method, path, headers, content, request_id)
        try:
            yield response
        except httpx.HTTPError as error:
            raise EngineError(self.role, url, error) from error
        finally:
            await response.aclose()

    async def _send(
        self, method: str, path: str, headers: Headers, content: bytes, request_id: str
    ) -> tuple[str, httpx.Response]:
        *alternatives, last = self._balancer.order()
        for url in alternatives:
            try:
                return url, await self._send_to(url, method, path, headers, content)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                log.warning(
                    "request %s: no connection to %s engine %s (%s): trying another one",
                    request_id,
                    self.role.value,
                    url,
                    describe(error),
                )
            except httpx.HTTPError as error:
                raise EngineError(self.role, url, error) from error
        try:
            return last, await self._send_to(last, method, path, headers, content)
        except httpx.HTTPError as error:
            raise EngineError(self.role, last, error) from error

    async def _send_to(self, url: str, method: str, path: str, headers: Headers, content: bytes) -> httpx.Response:
        request = self._client.build_request(method, url + path, headers=headers, content=content)
        return await self._client.send(request, stream=True)

    async def probe(self, url: str, timeout: float) -> str:
        """ "ok", or why the engine does not look healthy."""
        try:
            response = await self._client.get(f"{url}/health", timeout=timeout)
        except httpx.HTTPError as error:
            return describe(error)
        return "ok" if response.is_success else f"HTTP {response.status_code}"

    async def aclose(self) -> None:
        await self._client.aclose()


def describe(error: httpx.HTTPError) -> str:
    """httpx leaves the message of most timeouts empty."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
