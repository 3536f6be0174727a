# SPDX-License-Identifier: Apache-2.0
"""All client requests in flight, their attempts at decode engines, and the tickets that those post for them.

`RequestTable` finds the attempt and the prompt that a ticket is for, by the decode engine's name for its request.
"""

from __future__ import annotations

import enum
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vllm_ascend_pd.core.text import UNREADABLE, why_unreadable
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket_params import BY_PREFILL
from vllm_ascend_pd.proxy.http.arriving import LARGE_BODY_BYTES, Turns
from vllm_ascend_pd.proxy.http.bodies import ClientRequest, Content
from vllm_ascend_pd.proxy.http.endpoints import REQUEST_FORMATS, Endpoint, prompt_number, uuid_in
from vllm_ascend_pd.proxy.http.messages import (
    Headers,
    RequestRefused,
    TooLarge,
    decode_request_headers,
    prefill_request_headers,
    read_all,
)
from vllm_ascend_pd.proxy.http.streams import Reply
from vllm_ascend_pd.proxy.routing.answers import RULES, Asks, Counts, EngineRole, Failure
from vllm_ascend_pd.proxy.routing.concurrency import RequestAdmission, RequestGroup
from vllm_ascend_pd.proxy.routing.engine_pool import EngineCall

_T = TypeVar("_T")
_LOOKUPS = 64
"""GET requests that are served at a time."""


class RequestPhase(enum.Enum):
    """How far a client's request has come."""

    ARRIVING = "arriving"
    """Its body has not arrived completely."""
    QUEUED = "queued"
    """It waits for a slot at a decode engine."""
    DECODE = "decode"
    """A decode engine has it and has posted no ticket: not yet, or because it needs no prefill."""
    PREFILL = "prefill"
    """A prefill engine computes one of its prompts, or a ticket waits for a prefill engine."""
    TRANSFER = "transfer"
    """All prompts posted so far are prefilled. The rest of the KV, or the first token, is still to come."""
    ANSWERING = "answering"
    """The client has got a part of the response. Without a stream, that is all of it at once."""


class ProxiedRequest:
    """One client request from its arrival to its end, over all attempts at decode and prefill engines.

    All its work runs under `scope`, and only `end` cuts that short. The task that serves the client changes it, and so
    does the metaserver, by the methods below.
    """

    def __init__(self, method: str, path: str, endpoint: Endpoint | None, headers: Headers, reply: Reply) -> None:
        self.method = method
        self.path = path
        """The route's."""
        self.endpoint = endpoint
        """Whose prompts prefill computes; None if decode answers the route's requests without prefill."""
        self.format = None if endpoint is None else REQUEST_FORMATS[endpoint]
        """What its requests look like."""
        self.headers = headers
        """The client's."""
        self.reply = reply
        self.who_computes: str | None = None
        """Who is to compute its prompts by the client's wish, `BY_DECODE` or `BY_PREFILL`; None: it has none."""
        self.request: ClientRequest | None = None
        """The parsed body. None until it has arrived, and for requests that need no prefill: no ticket matches them."""
        self.content = Content()
        """The body, which decode gets as it is if the request needs no prefill."""
        self.request_id = ""
        """The id of the last attempt. `RequestTable.attempt` sets it."""
        self.scope = anyio.CancelScope()
        """Cancelled by `end`."""
        self.final_response: Response | None = None
        """What the client gets instead of a decode engine's response."""
        self.failed_prefill: set[str] = set()
        """URLs of prefill engines that failed for this request."""
        self.counted_refusals: set[str] = set()
        """URLs of prefill engines whose refusal of its tickets was counted."""
        self.prefills = RequestGroup()
        """All its prefills, of all attempts. They share one place in the queue."""
        self.prefill_gone = False
        """Whether prefill engines were gone when one of its tickets needed one."""
        self.told_without_prefill = False
        """Whether decode was told, at any attempt, that no prefill engine is well."""
        self.prefill_failures: dict[int, list[Failure]] = {}
        """Why prefills failed, by the number of the prompt; of several samples, those of the one with most failures."""
        self._ended = False
        """Whether `end` was called. Later responses are ignored."""

    @property
    def may_fall_back(self) -> bool:
        """Whether decode may be told that no prefill engine is well."""
        return self.who_computes != BY_PREFILL

    def prefill_failed(self, ticket: TicketProgress, failure: Failure) -> None:
        """Records a failed prefill of a ticket. It counts for tickets of later attempts, too."""
        ticket.failures.append(failure)
        known = self.prefill_failures.get(ticket.prompt, [])
        self.prefill_failures[ticket.prompt] = max(known, ticket.failures, key=len)
        rule = RULES[EngineRole.PREFILL, failure.kind]
        if rule.counts is Counts.YES or rule.asks is Asks.NONE:
            self.failed_prefill.add(failure.url)

    def end(self, response: Response | None) -> None:
        """Stops all work for this request. Only the first call counts.

        `response`: for the client; None if the client has left.
        """
        if not self._ended:
            self._ended = True
            self.final_response = response
            self.scope.cancel()


class TicketProgress(EngineCall):
    """The prefill of one ticket, and how far it has come. The task that serves the ticket owns it; others call its
    methods."""

    def __init__(
        self, attempt: DecodeAttempt, prompt: int, failures: Sequence[Failure], is_decodes: bool = True
    ) -> None:
        """
        Args:
            attempt: the ticket's.
            prompt: the number of the prompt in the request.
            failures: of the same prompt's prefills under earlier decode attempts.
            is_decodes: whether a decode engine certainly posted the ticket. False: a client may have made it up.
        """
        super().__init__()
        self.posted_at = time.monotonic()
        self._is_decodes = is_decodes
        self.attempt = attempt
        self.prompt = prompt
        self.failures = list(failures)
        """Why prefills of this prompt failed, under earlier decode attempts too. Each sample has its own list."""
        self.answered = False
        """Whether the decode engine has got a 200 for the ticket. It then waits for the KV only."""
        self.given_up = False
        """Whether the decode engine has reported that it waits for the KV no longer."""
        self.recomputes = False
        """Whether the decode engine computes the prompt itself if the KV does not come."""
        self.is_judged = False
        """Whether what became of the prefill and its transfer was recorded. Only the first result counts."""
        self.answer: Response | None = None
        """What the decode engine is told when the prefill has ended. None if the prefill was cancelled."""
        self.held: Response | None = None
        """The same of an intent whose prompt prefill has computed."""
        self.posted = False
        """Whether an earlier post has begun the prefill. A ticket has only one, however often it is posted."""
        self._prefill: anyio.CancelScope | None = None
        """The work on the ticket, while it lasts."""
        self._ended: anyio.Event | None = None
        """Set when the prefill has ended. None if nobody waits for that."""
        self._waiting = 0
        """Posts of the ticket that wait for the answer."""

    @property
    def is_evidence(self) -> bool:
        return self._is_decodes

    @property
    def has_failed(self) -> bool:
        """Whether the decode engine has been told that the prefill failed."""
        return self.answer is not None and not self.answered

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """The time in which the ticket is prefilled. `cancel` and the end of the attempt end it early."""
        self.posted = True
        try:
            with anyio.CancelScope() as self._prefill, self.attempt.prefilling(self):
                yield
        finally:
            # A request keeps all its tickets, up to thousands. With their scopes and events, the garbage collector
            # would stop the event loop for 50 ms and more.
            self._prefill = self._scope = None
            if self._ended is not None:
                self._ended.set()

    async def wait(self) -> None:
        """Returns when the prefill, which has begun, has ended."""
        if self._prefill is not None:
            self._ended = self._ended or anyio.Event()
            await self._ended.wait()

    def waits(self) -> None:
        """A post waits for the answer from now on."""
        self._waiting += 1

    def lost(self) -> None:
        """The connection of a post that waited was closed."""
        self._waiting -= 1

    @property
    def left(self) -> bool:
        """Whether the decode engine has closed the connection on which it waited, and not posted the ticket again."""
        return not self._waiting

    def cancel(self) -> None:
        """Nobody waits for the KV any more."""
        if self._prefill is not None:
            self._prefill.cancel()


class DecodeAttempt(EngineCall):
    """A client's request at one decode engine, under an id of its own.

    The task that serves the client changes it, and so does the metaserver, by the methods below.
    """

    def __init__(self, proxied: ProxiedRequest, request_id: str, may_follow: Callable[[], bool]) -> None:
        """
        Args:
            proxied: the request, whose body has arrived.
            request_id: unique. The engine's names for its requests contain it.
            may_follow: tells whether another attempt is allowed if this one gets no KV.
        """
        super().__init__()
        self.proxied = proxied
        self.request_id = request_id
        self.decode_headers = decode_request_headers(proxied.headers, request_id)
        """Headers of the request to the decode engine."""
        self.prefill_headers = prefill_request_headers(self.decode_headers)
        """Headers of the requests to prefill engines."""
        self.without_prefill = False
        """Whether decode was told that no prefill engine is well."""
        self.answering = False
        """Whether the client has got a part of the response. Then no other engine can answer any more."""
        self.over = False
        """Whether the attempt has ended or was given up. Its prefills end too."""
        self.tickets: dict[tuple[int, str], TicketProgress] = {}
        """By the number of the prompt, and the ticket's id. Of tickets without an id, the last one."""
        self._named_tickets: Counter[int] = Counter()
        """How many of them have an id, by the number of the prompt."""
        self.prefilled_at: float | None = None
        """When the first prefill of a prompt succeeded, on `time.monotonic`'s clock."""
        self.transfer_failed = anyio.Event()
        """Set together with `transfer_failure`."""
        self.transfer_failure: Failure | None = None
        """The first reason why KV did not come. The decode engine's own answer does not contain it."""
        self._failed_ticket: TicketProgress | None = None
        """The ticket with this failure. None: it is the whole request's."""
        self._failed_before = dict(proxied.prefill_failures)
        """Why prefills failed under earlier attempts, by the number of the prompt."""
        self._may_follow = may_follow
        self._prefills: set[TicketProgress] = set()
        """Tickets that are being prefilled."""

    @property
    def request(self) -> ClientRequest:
        """The client's request, of an attempt that tickets match."""
        assert self.proxied.request is not None
        return self.proxied.request

    @property
    def has_one_sequence(self) -> bool:
        """Whether it generates from one prompt, once. Its first token then shows that all KV has arrived."""
        return len(self.request.prompts) * self.request.samples == 1

    @property
    def begun(self) -> bool:
        """Another engine's tickets would be taken for this one's."""
        return bool(self.tickets)

    @property
    def may_stall(self) -> bool:
        """False while a prefill engine computes: decode waits for it, and that engine is watched by itself."""
        return not self._prefills

    @property
    def phase(self) -> RequestPhase:
        if self.answering:
            return RequestPhase.ANSWERING
        if not self.engine:
            return RequestPhase.QUEUED
        if self._prefills:
            return RequestPhase.PREFILL
        return RequestPhase.DECODE if self.prefilled_at is None else RequestPhase.TRANSFER

    @property
    def may_begin_anew(self) -> bool:
        """Whether another attempt may replace this one: it is allowed, and the client has got nothing yet."""
        return not self.answering and self._may_follow()

    def ticket(
        self, prompt: int, ticket_id: str, samples: int, replaces: str = "", is_authentic: bool = False
    ) -> TicketProgress | None:
        """Registers a ticket that the decode engine posts, for the first time or again.

        Args:
            prompt: the number of the prompt.
            ticket_id: empty for tickets of other connectors, which are not matched with earlier posts.
            samples: how many tickets the prompt may have at a time.
            replaces: the id of the ticket whose place this one takes. Empty if there is none.
            is_authentic: whether the poster has shown the decode engines' token. A client without it learns the
                request's id only with the first part of the answer.

        Returns:
            The ticket's progress, or None if the prompt has all its tickets already, under other ids.
        """
        failures: Sequence[Failure] = self._failed_before.get(prompt, ())
        is_decodes = is_authentic or not self.answering
        if not ticket_id:
            self.tickets[prompt, ""] = unnamed = TicketProgress(self, prompt, failures, is_decodes)
            return unnamed
        progress = self.tickets.get((prompt, ticket_id))
        if progress is None:
            if replaces and (replaced := self.tickets.pop((prompt, replaces), None)) is not None:
                failures = self._end_replaced(replaced)
            if self._named_tickets[prompt] >= samples:
                return None
            self._named_tickets[prompt] += 1
            progress = self.tickets[prompt, ticket_id] = TicketProgress(self, prompt, failures, is_decodes)
        return progress

    def _end_replaced(self, ticket: TicketProgress) -> Sequence[Failure]:
        """Ends a ticket whose place another one takes, and which is out of `tickets`. Returns the failures that the
        other one inherits: none if the KV had come, since decode has gone on from there."""
        ticket.cancel()
        self._named_tickets[ticket.prompt] -= 1
        if self._failed_ticket is ticket:
            self.transfer_failure, self._failed_ticket = None, None
            self.transfer_failed = anyio.Event()
        return () if ticket.answered and not ticket.given_up else ticket.failures

    @contextmanager
    def prefilling(self, ticket: TicketProgress) -> Iterator[None]:
        """The time in which a ticket is prefilled."""
        self._prefills.add(ticket)
        try:
            yield
        finally:
            self._prefills.discard(ticket)
            if not math.isinf(self.silent_since):
                self.heard()  # decode had nothing to compute meanwhile

    def prefilled(self) -> None:
        """The prefill of a prompt has succeeded."""
        self.prefilled_at = self.prefilled_at or time.monotonic()

    def note_transfer_failure(self, failure: Failure, ticket: TicketProgress | None = None) -> None:
        """Records why KV did not come. Only the first reason counts.

        `ticket`: the one that it was to come for. None: the whole attempt fails, or gets no ticket.
        """
        if self.transfer_failure is None:
            self.transfer_failure, self._failed_ticket = failure, ticket
        self.transfer_failed.set()

    def end(self) -> None:
        """Gives the attempt up because of its transfer failure. Another attempt may follow."""
        assert self.transfer_failure is not None
        self.over = True
        self.scope.cancel()

    def close(self) -> None:
        """The attempt has ended, however it did: ends its prefills."""
        self.over = True
        for ticket in self._prefills:
            ticket.cancel()


class RequestTable:
    """Admits client requests, and holds those that are being served and their current attempts.

    The event loop's thread owns it.
    """

    def __init__(self, limit: int, queue_length: int = 0, timeout: float = 0.0) -> None:
        """Arguments: as in RequestAdmission."""
        self.admission = RequestAdmission(limit, queue_length, timeout)
        self._lookups = RequestAdmission(_LOOKUPS, queue_length, timeout)
        """Of GET requests: they wait for each other alone, not for what engines compute."""
        self._open: set[ProxiedRequest] = set()
        """Requests being served, and those that wait for that."""
        self._attempts: dict[str, DecodeAttempt] = {}
        """Attempts in flight, by their request ids."""
        self._posts: set[anyio.CancelScope] = set()
        """Other bodies that are being read."""
        self._large_bodies = Turns(1)
        self._closed = False
        """Whether the proxy shuts down."""

    def admission_of(self, proxied: ProxiedRequest) -> RequestAdmission:
        """Where a request waits to be served."""
        return self._lookups if proxied.method == "GET" else self.admission

    @property
    def in_flight(self) -> int:
        """Number of requests being served, those whose bodies are still arriving included."""
        return len(self._open) - self.admission.waiting - self._lookups.waiting

    def phases(self) -> Mapping[RequestPhase, int]:
        """Number of requests in each phase. The sum is `in_flight`."""
        counted = Counter(attempt.phase for attempt in self._attempts.values())
        counted[RequestPhase.ARRIVING] = self.in_flight - counted.total()
        return {phase: counted[phase] for phase in RequestPhase}

    @owned
    @contextmanager
    def open(self, proxied: ProxiedRequest) -> Iterator[None]:
        """A new request, for the time of the `with` block. Raises RequestRefused: 429 if the queue is full, 503 if the
        proxy shuts down."""
        if self._closed:
            raise _shutting_down()
        self.admission_of(proxied).check_queue()
        self._open.add(proxied)
        try:
            yield
        finally:
            self._open.discard(proxied)

    @owned
    @contextmanager
    def attempt(self, proxied: ProxiedRequest, may_follow: Callable[[], bool]) -> Iterator[DecodeAttempt]:
        """A new attempt at answering a request. It ends with the `with` block, and its prefills end with it.

        Each attempt has its own id, so tickets of earlier attempts match nothing any more. `may_follow`: as in
        DecodeAttempt.
        """
        # Never the client's own id: tickets are matched by it, so it must be unique and hard to guess.
        request_id = proxied.request_id = str(uuid.uuid4())
        attempt = self._attempts[request_id] = DecodeAttempt(proxied, request_id, may_follow)
        try:
            yield attempt
        finally:
            del self._attempts[request_id]
            attempt.close()

    @owned
    def find(self, engine_request_id: str) -> tuple[DecodeAttempt, int, bool]:
        """Finds what a decode engine's post is about, by that engine's name for its request.

        Returns the attempt, the number of the prompt in the request, and whether it is one of several samples, which
        each have an id of their own. Raises RequestRefused (404) if there is none.
        """
        attempt = self._attempts.get(uuid_in(engine_request_id))
        request = None if attempt is None else attempt.proxied.request
        found = None if request is None else prompt_number(request.endpoint, engine_request_id)
        if attempt is None or request is None or found is None or found[0] >= len(request.prompts):
            raise RequestRefused(HTTPStatus.NOT_FOUND, "no request is waiting under this request_id")
        return attempt, *found

    async def may_decode(self, body: bytes | bytearray) -> None:
        """Returns when a body may be decoded: large ones stop the event loop for long enough one by one."""
        if len(body) > LARGE_BODY_BYTES:
            await self._large_bodies.wait()

    async def read(self, request: Request, limit: int, decode: Callable[[bytes], _T], name: str) -> _T:
        """Reads and decodes the body of a post that is no client request.

        Args:
            request: the post.
            limit: bytes of the body.
            decode: decodes the body. Raises one of `UNREADABLE`.
            name: what the body is called in errors.

        Raises:
            RequestRefused: 413 for a body that is too large, 400 for one that cannot be read, 503 if the proxy shuts
                down.
        """
        if self._closed:
            raise _shutting_down()
        scope, body = anyio.CancelScope(), b""
        self._posts.add(scope)
        try:
            with scope:
                body = await read_all(request.stream(), limit)
                await self.may_decode(body)
                return decode(body)
            raise _shutting_down()
        except TooLarge:
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the {name} exceeds {limit} bytes") from None
        except ClientDisconnect:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, f"the {name} did not arrive") from None
        except UNREADABLE as error:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, f"not a {name}: {why_unreadable(body, error)}") from None
        finally:
            self._posts.discard(scope)

    @owned
    def shut_down(self) -> None:
        """Ends all requests and the reading of all posts, and refuses new ones."""
        self._closed = True
        for proxied in self._open:
            proxied.end(_shutting_down().response())
        for scope in self._posts:
            scope.cancel()


def _shutting_down() -> RequestRefused:
    return RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "the proxy is shutting down")
