# SPDX-License-Identifier: Apache-2.0
"""All client requests in flight, and the lookup that matches a decode engine's tickets with them."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import NamedTuple

import anyio
from starlette.types import Receive

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.bodies import ClientRequest
from vllm_ascend_pd.proxy.http.endpoints import prompt_number, uuid_in
from vllm_ascend_pd.proxy.http.errors import RequestRefused
from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.rendezvous.decode_attempt import DecodeAttempt, RequestPhase
from vllm_ascend_pd.proxy.rendezvous.observer import REQUEST_ID, Span
from vllm_ascend_pd.proxy.rendezvous.proxied_request import ProxiedRequest
from vllm_ascend_pd.proxy.routing.concurrency import RequestAdmission


class TicketMatch(NamedTuple):
    """The request, attempt and prompt that a ticket is for."""

    proxied: ProxiedRequest
    attempt: DecodeAttempt
    request: ClientRequest
    """The client's parsed body."""
    prompt: int
    """The number of the prompt in the request."""
    is_sample: bool
    """Whether the ticket is for one of several samples, which each have an id of their own."""


class RequestTable:
    """Admits client requests, and holds those that are being served and their current attempts.

    The event loop's thread owns it.
    """

    def __init__(self, limit: int, queue_length: int = 0, timeout: float = 0.0, max_body_bytes: int = 0) -> None:
        """Arguments: as in RequestAdmission."""
        self.admission = RequestAdmission(limit, queue_length, timeout, max_body_bytes)
        self._open: set[ProxiedRequest] = set()
        """Requests being served."""
        self._attempts: dict[str, tuple[ProxiedRequest, DecodeAttempt]] = {}
        """Attempts in flight, by their request ids."""
        self._scopes: set[anyio.CancelScope] = set()
        """Other work that ends when the proxy shuts down."""
        self._closed = False
        """Whether the proxy shuts down."""

    @property
    def in_flight(self) -> int:
        """Number of requests being served."""
        return len(self._open)

    def phases(self) -> Mapping[RequestPhase, int]:
        """Number of requests in each phase. The sum is `in_flight`."""
        counted = Counter(attempt.phase for _, attempt in self._attempts.values())
        counted[RequestPhase.ARRIVING] = len(self._open) - counted.total()
        return {phase: counted[phase] for phase in RequestPhase}

    @owned
    @asynccontextmanager
    async def admitted(self, receive: Receive) -> AsyncIterator[Receive]:
        """Waits until a request may be served, and counts it as served for the time of the `async with` block.

        Yields the callable to receive the request by. Raises what `RequestAdmission.wait` raises, and RequestRefused
        (503) if the proxy shuts down.
        """
        if not self.admission.enter():
            with self.until_shut_down():
                receive = await self.admission.wait(receive)
        try:
            yield receive
        finally:
            self.admission.leave()

    @owned
    @contextmanager
    def open(self, span: Span) -> Iterator[ProxiedRequest]:
        """A new request. Raises RequestRefused (503) if the proxy shuts down."""
        if self._closed:
            raise _shutting_down()
        proxied = ProxiedRequest(span)
        self._open.add(proxied)
        try:
            yield proxied
        finally:
            self._open.discard(proxied)
            proxied.close()

    @owned
    @contextmanager
    def attempt(
        self, proxied: ProxiedRequest, client_headers: Headers, may_follow: Callable[[], bool]
    ) -> Iterator[DecodeAttempt]:
        """A new attempt at answering a request. It ends with the `with` block, and its prefills end with it.

        Each attempt has its own id, so tickets of earlier attempts match nothing any more.

        Args:
            proxied: the request, whose body has arrived.
            client_headers: as in DecodeAttempt.
            may_follow: as in DecodeAttempt.
        """
        # Never the client's own id: tickets are matched by it, so it must be unique and hard to guess.
        request_id = proxied.request_id = str(uuid.uuid4())
        with proxied.span.child("decode", {REQUEST_ID: request_id}) as span:
            attempt = DecodeAttempt(request_id, span, client_headers, proxied.request is None, may_follow)
            self._attempts[request_id] = (proxied, attempt)
            try:
                yield attempt
            finally:
                del self._attempts[request_id]
                attempt.close()
                span.asked(attempt.engines)

    @owned
    def find(self, engine_request_id: str) -> TicketMatch:
        """Finds what a ticket is for, by the decode engine's name for its request. Raises LookupError."""
        proxied, attempt = self._attempts.get(uuid_in(engine_request_id), (None, None))
        request = proxied.request if proxied else None
        found = None if request is None else prompt_number(request.endpoint, engine_request_id)
        if proxied is None or attempt is None or request is None or found is None:
            raise LookupError(engine_request_id)
        prompt, is_sample = found
        if prompt >= len(request.prompts):
            raise LookupError(engine_request_id)
        return TicketMatch(proxied, attempt, request, prompt, is_sample)

    @owned
    @contextmanager
    def until_shut_down(self) -> Iterator[None]:
        """Work that is no client request. Raises RequestRefused (503) if the proxy shuts down, then or meanwhile."""
        if self._closed:
            raise _shutting_down()
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            raise _shutting_down()

    @owned
    def shut_down(self) -> None:
        """Ends all requests and all work under `until_shut_down`, and refuses new requests."""
        self._closed = True
        for proxied in self._open:
            proxied.end(_shutting_down().response())
        for scope in self._scopes:
            scope.cancel()


def _shutting_down() -> RequestRefused:
    return RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "the proxy is shutting down")
