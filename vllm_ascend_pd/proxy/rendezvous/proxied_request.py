# SPDX-License-Identifier: Apache-2.0
"""Client requests in flight: what a ticket is matched against, and what ends when a request ends."""

from __future__ import annotations

import enum
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import NamedTuple

import anyio
from starlette.responses import Response
from starlette.types import Receive

from vllm_ascend_pd.proxy.http.bodies import ClientRequest
from vllm_ascend_pd.proxy.http.endpoints import prompt_number, uuid_in
from vllm_ascend_pd.proxy.http.errors import RequestRefused
from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.rendezvous.observer import REQUEST_ID, Span
from vllm_ascend_pd.proxy.rendezvous.retry import Failure
from vllm_ascend_pd.proxy.routing.concurrency import RequestGroup
from vllm_ascend_pd.proxy.routing.engine_call import EngineCall
from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind
from vllm_ascend_pd.proxy.routing.request_admission import RequestAdmission


class RequestPhase(enum.Enum):
    """Where a client's request is."""

    ARRIVING = "arriving"
    """Its body is not here yet."""
    QUEUED = "queued"
    """It waits for a place at a decode engine."""
    DECODE = "decode"
    """A decode engine has it and has posted no ticket: not yet, or it needs no prefill."""
    PREFILL = "prefill"
    """A prefill engine computes a prompt of it, or the ticket waits for one."""
    TRANSFER = "transfer"
    """All that was asked for is prefilled; the rest of the KV, or the first token, is on its way."""
    ANSWERING = "answering"
    """The client has something of the answer: without a stream, that is all of it at once."""


class TicketProgress:
    """A ticket of an attempt: who prefills it, and what became of that."""

    def __init__(self, attempt: int, failures: Sequence[Failure]) -> None:
        """`failures`: of the prompt's prefills under earlier requests."""
        self.attempt = attempt
        """Of the ticket, as it was sent to a prefill engine last."""
        self.failures = list(failures)
        """Why the prompt's prefills failed, those of earlier requests included. Other samples of the same prompt have
        their own."""
        self.post: anyio.CancelScope | None = None
        """Decode's waiting for an answer."""
        self.run = EngineCall()
        """The last one."""
        self.answered = False
        """Decode was told that prefill has run: it waits for the KV alone."""
        self.given_up = False
        """Decode waits for no further attempt."""
        self.left = False
        """Decode closed the connection it waited on."""
        self.recomputes = False
        """Decode computes the prompt itself if its KV does not come."""


class DecodeAttempt(EngineCall):
    """A client's request at one decode engine."""

    def __init__(self, request_id: str, may_follow: Callable[[], bool], span: Span) -> None:
        """`may_follow`: whether another would, should this one get no KV."""
        super().__init__()
        self._may_follow = may_follow
        self.request_id = request_id
        self.span = span
        self.prefill_headers: Headers = []
        self.alone = False
        """Decode answers by itself: no ticket is to come."""
        self.answering = False
        """Something of the answer has gone to the client: from here on it, good or bad, is the decode engine's."""
        self.over = False
        """It has ended, or was given up: its prefills end, too."""
        self.tickets: dict[tuple[int, str], TicketProgress] = {}
        """By the number of the prompt and the ticket's id."""
        self.prefilled_at: float | None = None
        """When a first prompt's prefill had succeeded, on `time.monotonic`'s clock."""
        self.transfer_failed = anyio.Event()
        self.transfer_failure: Failure | None = None
        """The first reason why KV did not come: a decode engine that ends by it does not say so."""
        self._prefills: set[anyio.CancelScope] = set()

    @property
    def may_stall(self) -> bool:
        """While a prefill engine computes, decode waits for it, and that engine is watched itself."""
        return not self._prefills

    @property
    def phase(self) -> RequestPhase:
        if self.answering:
            return RequestPhase.ANSWERING
        if not self.engines:
            return RequestPhase.QUEUED
        if self._prefills:
            return RequestPhase.PREFILL
        return RequestPhase.DECODE if self.prefilled_at is None else RequestPhase.TRANSFER

    def ticket(
        self, prompt: int, ticket_id: str, attempt: int, failures: Sequence[Failure], samples: int
    ) -> TicketProgress | None:
        """Of a ticket that decode posts: for the first time, or again because it lost the connection. A prefill of
        then is cancelled, and the next one is another attempt. `failures` as in TicketProgress. None: the prompt has
        `samples` tickets already, all that a decode engine gives out for it."""
        if not ticket_id:
            return TicketProgress(attempt, failures)
        state = self.tickets.get((prompt, ticket_id))
        if state is None:
            if sum(of == prompt for of, _ in self.tickets) >= samples:
                return None
            state = self.tickets[prompt, ticket_id] = TicketProgress(attempt, failures)
        else:
            state.attempt += 1
            state.left = False
            if state.post is not None:
                state.post.cancel()
        return state

    def note_transfer_failure(self, failure: Failure) -> None:
        self.transfer_failure = self.transfer_failure or failure
        self.transfer_failed.set()

    @property
    def may_begin_anew(self) -> bool:
        """Whether the same request can be made again, and nobody has seen anything of this one."""
        return not self.answering and self._may_follow()

    def end(self) -> None:
        """Gives the attempt up for its transfer's failure: another one may follow."""
        assert self.transfer_failure is not None
        self.over = True
        self.scope.cancel()

    @contextmanager
    def prefill(self) -> Iterator[anyio.CancelScope]:
        """A scope that is cancelled when the attempt is over."""
        with anyio.CancelScope() as scope:
            self._prefills.add(scope)
            try:
                yield scope
            finally:
                self._prefills.discard(scope)
                if not math.isinf(self.silent_since):
                    self.heard()  # decode had nothing to compute meanwhile

    def close(self) -> None:
        self.over = True
        for scope in self._prefills:
            scope.cancel()


class ProxiedRequest:
    """One client request. All its work runs under `scope`; `end` is the only way to cut it short."""

    def __init__(self, attempts: dict[str, tuple[ProxiedRequest, DecodeAttempt]], span: Span) -> None:
        self.span = span
        self.request: ClientRequest | None = None
        """None until the body has arrived: no ticket can be meant for it before."""
        self.request_id = ""
        """Of the last attempt."""
        self.scope = anyio.CancelScope()
        self.final_response: Response | None = None
        """What the client gets instead of the decode engine's answer."""
        self.failed_prefill: set[str] = set()
        """Prefill engines that failed for it."""
        self.prefills = RequestGroup()
        """All of its prompts and samples, under whichever attempt."""
        self._prefill_failures: dict[int, list[Failure]] = {}
        self._attempts = attempts
        self._ended = False

    def prefill_failures(self, prompt: int) -> Sequence[Failure]:
        """Why prefills of a prompt failed before the attempt that is under way was made."""
        return self._prefill_failures.get(prompt, ())

    def prefill_failed(self, state: TicketProgress, failure: Failure) -> None:
        state.failures.append(failure)
        if failure.kind is not FailureKind.REFUSED:  # which says nothing about the engine
            self.failed_prefill.add(failure.url)

    def begin_anew(self, attempt: DecodeAttempt, prompt: int, state: TicketProgress) -> None:
        """Gives an attempt up because KV did not come: tickets of the one that may follow inherit that one's
        failures."""
        self.inherit(prompt, state)
        attempt.end()

    def inherit(self, prompt: int, state: TicketProgress) -> None:
        """Tickets of the attempts that may follow get the failures of one of an earlier attempt's."""
        self._prefill_failures[prompt] = max(self._prefill_failures.get(prompt, []), state.failures, key=len)

    def end(self, final_response: Response | None) -> None:
        """Stops everything done for this request; the first final_response counts. None: nobody is there to read it."""
        if not self._ended:
            self._ended = True
            self.final_response = final_response
            self.scope.cancel()

    @contextmanager
    def attempt(self, may_follow: Callable[[], bool]) -> Iterator[DecodeAttempt]:
        """Under an id of its own: tickets of those before match nothing any more, and their prefills are cancelled.
        `may_follow` as in DecodeAttempt."""
        # Never the client's own id: tickets are matched by it, so it must be unique and not guessable.
        request_id = self.request_id = str(uuid.uuid4())
        with self.span.child("decode", {REQUEST_ID: request_id}) as span:
            attempt = DecodeAttempt(request_id, may_follow, span)
            self._attempts[request_id] = (self, attempt)
            try:
                yield attempt
            finally:
                del self._attempts[request_id]
                attempt.close()
                span.asked(attempt.engines)

    def close(self) -> None:
        self._ended = True


class Waiting(NamedTuple):
    """Who waits for a ticket: number `prompt` of the request's."""

    proxied: ProxiedRequest
    attempt: DecodeAttempt
    request: ClientRequest
    prompt: int
    is_sample: bool
    """Decode asks for each of several samples under an id of its own."""


class RequestTable:
    """All of them, and who may begin one."""

    def __init__(self, limit: int, line: int = 0, patience: float = 0.0) -> None:
        """As in RequestAdmission."""
        self.admission = RequestAdmission(limit, line, patience)
        self._open: set[ProxiedRequest] = set()
        self._attempts: dict[str, tuple[ProxiedRequest, DecodeAttempt]] = {}
        self._scopes: set[anyio.CancelScope] = set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def phases(self) -> Mapping[RequestPhase, int]:
        """How many requests are where; all of them together are `in_flight`."""
        counted = Counter(attempt.phase for _, attempt in self._attempts.values())
        counted[RequestPhase.ARRIVING] = len(self._open) - counted.total()
        return {phase: counted[phase] for phase in RequestPhase}

    @asynccontextmanager
    async def admitted(self, receive: Receive) -> AsyncIterator[Receive]:
        """Waits until a request may be served; yields what to receive it by. Raises RequestRefused when too many wait,
        or it has waited too long (429), or the proxy shuts down (503); and ClientDisconnect when the client leaves."""
        if not self.admission.enter():
            with self.until_shut_down():
                receive = await self.admission.wait(receive)
        try:
            yield receive
        finally:
            self.admission.leave()

    @contextmanager
    def open(self, span: Span) -> Iterator[ProxiedRequest]:
        """Raises RequestRefused (503) when the proxy shuts down."""
        if self._closed:
            raise _shutting_down()
        proxied = ProxiedRequest(self._attempts, span)
        self._open.add(proxied)
        try:
            yield proxied
        finally:
            self._open.discard(proxied)
            proxied.close()

    @contextmanager
    def until_shut_down(self) -> Iterator[None]:
        """For what is no proxied: raises RequestRefused (503) when the proxy shuts down."""
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

    def find(self, engine_request_id: str) -> Waiting:
        """Who waits for a ticket. Raises LookupError when no request does under that id."""
        proxied, attempt = self._attempts.get(uuid_in(engine_request_id), (None, None))
        request = proxied.request if proxied else None
        found = None if request is None else prompt_number(request.endpoint, engine_request_id)
        if proxied is None or attempt is None or request is None or found is None:
            raise LookupError(engine_request_id)
        index, is_sample = found
        if index >= len(request.prompts):
            raise LookupError(engine_request_id)
        return Waiting(proxied, attempt, request, index, is_sample)

    def shut_down(self) -> None:
        """Ends every proxied, and whatever runs until then, and refuses new ones."""
        self._closed = True
        for proxied in self._open:
            proxied.end(_shutting_down().response())
        for scope in self._scopes:
            scope.cancel()


def _shutting_down() -> RequestRefused:
    return RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "the proxy is shutting down")
