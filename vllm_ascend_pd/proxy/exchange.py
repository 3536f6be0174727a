# SPDX-License-Identifier: Apache-2.0
"""Client requests in flight: what a ticket is matched against, and what ends when a request ends."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import anyio
from starlette.responses import Response

from .bodies import ClientRequest, Endpoint
from .errors import RequestRefused, error_response
from .headers import Headers

_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# vLLM names an engine request after X-Request-Id: a completion's carry the index of their prompt.
_COMPLETION_ID = re.compile(f"cmpl-({_UUID})-([0-9]{{1,6}})")
_CHAT_ID = re.compile(f"chatcmpl-({_UUID})")


class Exchange:
    """One client request. All its work runs under `scope`; `end` is the only way to cut it short."""

    def __init__(self) -> None:
        # Never the client's own id: tickets are matched by it, so it must be unique and not guessable.
        self.request_id = str(uuid.uuid4())
        self.request: ClientRequest | None = None
        """None until the body has arrived: no ticket can be meant for it before."""
        self.prefill_headers: Headers = []
        self.scope = anyio.CancelScope()
        self.answering = False
        """The decode engine has begun to answer: from here on the answer, good or bad, is its own."""
        self.verdict: Response | None = None
        """What the client gets instead of the decode engine's answer."""
        self._prefills: set[anyio.CancelScope] = set()
        self._ended = False

    def end(self, verdict: Response | None) -> None:
        """Stops everything done for this request; the first verdict counts. None: nobody is there to read it."""
        if not self._ended:
            self._ended = True
            self.verdict = verdict
            self.scope.cancel()

    @contextmanager
    def prefill(self) -> Iterator[anyio.CancelScope]:
        """A scope that is cancelled when the request is over."""
        with anyio.CancelScope() as scope:
            self._prefills.add(scope)
            try:
                yield scope
            finally:
                self._prefills.discard(scope)

    def close(self) -> None:
        self._ended = True
        for scope in self._prefills:
            scope.cancel()


class Exchanges:
    """At most `limit` exchanges at a time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[str, Exchange] = {}
        self._closed = False

    @contextmanager
    def open(self) -> Iterator[Exchange]:
        """Raises RequestRefused when the proxy is full (429) or shutting down (503)."""
        if self._closed:
            raise RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "the proxy is shutting down")
        if len(self._open) >= self._limit:
            raise RequestRefused(
                HTTPStatus.TOO_MANY_REQUESTS, f"the proxy already serves {self._limit} requests: retry later"
            )
        exchange = Exchange()
        self._open[exchange.request_id] = exchange
        try:
            yield exchange
        finally:
            del self._open[exchange.request_id]
            exchange.close()

    def find(self, engine_request_id: str) -> tuple[Exchange, ClientRequest, int]:
        """The exchange a ticket is for, its request, and the index of the ticket's prompt.

        Raises LookupError when no request waits under that id.
        """
        if completion := _COMPLETION_ID.fullmatch(engine_request_id):
            endpoint, request_id, index = Endpoint.COMPLETIONS, completion[1], int(completion[2])
        elif chat := _CHAT_ID.fullmatch(engine_request_id):
            endpoint, request_id, index = Endpoint.CHAT, chat[1], 0
        else:
            raise LookupError(engine_request_id)
        exchange = self._open.get(request_id)
        request = exchange.request if exchange else None
        if exchange is None or request is None or request.endpoint is not endpoint or index >= len(request.prompts):
            raise LookupError(engine_request_id)
        return exchange, request, index

    def shut_down(self) -> None:
        """Ends every exchange and refuses new ones."""
        self._closed = True
        for exchange in self._open.values():
            exchange.end(error_response(HTTPStatus.SERVICE_UNAVAILABLE, "the proxy is shutting down"))
