# SPDX-License-Identifier: Apache-2.0
"""All client requests on their way, and the tickets that decode engines post for them.

`ProxiedRequest` is a request on its way, `Prefill` what is made of one of its tickets. `RequestTable` admits requests,
and finds the one that a ticket is for by the decode engine's name for its request.
"""

from __future__ import annotations

import enum
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import TypeVar

import anyio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vllm_ascend_pd.core.text import UNREADABLE, why_unreadable
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.arriving import LARGE_BODY_BYTES, Turns
from vllm_ascend_pd.proxy.http.bodies import ClientRequest, Content
from vllm_ascend_pd.proxy.http.endpoints import REQUEST_FORMATS, Endpoint, prompt_number, uuid_in
from vllm_ascend_pd.proxy.http.messages import (
    Headers,
    RequestRefused,
    TooLarge,
    decode_request_headers,
    read_body,
)
from vllm_ascend_pd.proxy.http.streams import Reply
from vllm_ascend_pd.proxy.routing.answers import RULES, Asks, Counts, EngineRole, Failure
from vllm_ascend_pd.proxy.routing.dispatch import Attempt
from vllm_ascend_pd.proxy.routing.queue import HasSlots, NoFreeSlotError, Queue

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


class ProxiedRequest(Attempt):
    """A client's request on its way, from its arrival to its end: what the client has got, the decode engine that it is
    at, the tickets that this engine has posted, and what has failed so far.

    It is at one decode engine at a time, under an id for this attempt alone. The task that serves the client owns it.
    The metaserver changes it by the methods below.
    """

    def __init__(self, method: str, path: str, endpoint: Endpoint | None, headers: Headers, reply: Reply) -> None:
        super().__init__()
        self.method = method
        self.path = path
        """The route's."""
        self.endpoint = endpoint
        """Whose prompts prefill computes; None if decode answers the route's requests without prefill."""
        self.format = None if endpoint is None else REQUEST_FORMATS[endpoint]
        """What its requests look like."""
        self.headers = headers
        """The client's."""
        self.who_computes: str | None = None
        """Who is to compute its prompts by the client's wish, `BY_DECODE` or `BY_PREFILL`; None: it has none."""
        self.content = Content()
        """The body, which decode gets as it is if the request needs no prefill."""
        self.parsed: ClientRequest | None = None
        """The body. None until it has arrived, and for requests that need no prefill: no ticket matches them."""

        self.reply = reply
        """What the client has got."""
        self.lifetime = anyio.CancelScope()
        """All work for it runs under this scope. `end` cancels it."""
        self.final_response: Response | None = None
        """What the client gets instead of a decode engine's response."""
        self._ended = False
        """Whether `end` was called. Later responses are ignored."""

        self.failures: list[Failure] = []
        """Of its attempts at decode."""
        self.prefill_failures: dict[int, list[Failure]] = {}
        """Why prefills failed, by the number of the prompt; of several samples, those of the one with most failures."""
        self.failed_prefill_urls: set[str] = set()
        """URLs of prefill engines that failed for it."""
        self.counted_refusals: set[str] = set()
        """URLs of prefill engines whose refusal of its tickets was counted."""
        self.slots_given = 0
        """Slots that its prefills had, over all attempts: they count as one in the queue. The queue changes it."""
        self.prefill_gone = False
        """Whether prefill engines were gone when one of its tickets needed one."""
        self.told_without_prefill = False
        """Whether decode was told, at any attempt, that no prefill engine is well."""

    def begin(self, request_id: str) -> None:
        """An attempt at a decode engine begins, under another id: no post about an earlier attempt finds it.

        `request_id`: unique. The engine's names for its requests contain it.
        """
        self._begin()
        self.request_id = request_id
        self.decode_headers = decode_request_headers(self.headers, request_id)
        """Headers of the request to the decode engine."""
        self.without_prefill = False
        """Whether decode was told that no prefill engine is well."""
        self.prefills: dict[tuple[int, str], Prefill] = {}
        """Of each ticket, by the number of the prompt and the ticket's id. Of tickets without an id, the last one."""
        self._named_tickets: Counter[int] = Counter()
        """How many of the tickets have an id, by the number of the prompt."""
        self.prefilling: set[Prefill] = set()
        """Those that are being prefilled."""
        self.prefilled_at: float | None = None
        """When the first prefill of a prompt succeeded, on `time.monotonic`'s clock."""
        self.transfer_failed = anyio.Event()
        """Set together with `transfer_failure`."""
        self.transfer_failure: Failure | None = None
        """The first reason why KV did not come. The decode engine's own answer does not contain it."""
        self._failed_prefill: Prefill | None = None
        """The one with this failure. None: it is the whole request's."""
        self._failed_before = dict(self.prefill_failures)
        """Why prefills failed under earlier attempts, by the number of the prompt."""

    @property
    def may_stall(self) -> bool:
        """False while a prefill engine computes: decode waits for it, and that engine is watched by itself."""
        return not self.prefilling

    @property
    def phase(self) -> RequestPhase:
        if self.reply.started:
            return RequestPhase.ANSWERING
        if not self.engine:
            return RequestPhase.QUEUED
        if self.prefilling:
            return RequestPhase.PREFILL
        return RequestPhase.DECODE if self.prefilled_at is None else RequestPhase.TRANSFER

    def prefill_for(
        self, prompt: int, ticket_id: str, samples: int, replaces: str = "", is_authentic: bool = False
    ) -> Prefill | None:
        """Registers a ticket that the decode engine posts, for the first time or again.

        Args:
            prompt: the number of the prompt.
            ticket_id: empty for tickets of other connectors, which are not matched with earlier posts.
            samples: how many tickets the prompt may have at a time.
            replaces: the id of the ticket whose place this one takes. Empty if there is none.
            is_authentic: whether the poster has shown the decode engines' token. A client without it learns the
                request's id only with the first part of the answer.

        Returns:
            The ticket's prefill, or None if the prompt has all its tickets already, under other ids.
        """
        known = self.prefills.get((prompt, ticket_id))
        if ticket_id and known is not None:
            return known
        failures: Sequence[Failure] = self._failed_before.get(prompt, ())
        if ticket_id:
            if replaces and (replaced := self.prefills.pop((prompt, replaces), None)) is not None:
                failures = self._end_replaced(replaced)
            if self._named_tickets[prompt] >= samples:
                return None
            self._named_tickets[prompt] += 1
        prefill = Prefill(self, prompt, failures, is_evidence=is_authentic or not self.reply.started)
        self.prefills[prompt, ticket_id] = prefill
        self.begun = True  # another engine's tickets would be taken for this one's
        return prefill

    def _end_replaced(self, prefill: Prefill) -> Sequence[Failure]:
        """Ends the prefill of a ticket whose place another one takes. Returns the failures that the other one inherits:
        none if the KV had come, since decode has gone on from there."""
        prefill.end()
        self._named_tickets[prefill.prompt] -= 1
        if self._failed_prefill is prefill:
            self.transfer_failure, self._failed_prefill = None, None
            self.transfer_failed = anyio.Event()
        return () if prefill.answered and not prefill.given_up else prefill.failures

    def note_transfer_failure(self, failure: Failure, prefill: Prefill | None = None) -> None:
        """Records why KV did not come. Only the first reason counts.

        `prefill`: the one that it was to come from. None: the whole attempt fails, or gets no ticket.
        """
        if self.transfer_failure is None:
            self.transfer_failure, self._failed_prefill = failure, prefill
        self.transfer_failed.set()

    def give_up(self) -> None:
        """Ends the attempt because of its transfer failure. Another one may follow."""
        assert self.transfer_failure is not None
        self._failed_prefill = None  # a ticket that takes its place, and came at the same time, is too late
        for prefill in (*self.prefills.values(), *self.prefilling):
            prefill.is_over = True
        if self.scope is not None:
            self.scope.cancel()

    def end_attempt(self) -> None:
        """The attempt has ended, however it did: ends its prefills."""
        for prefill in (*self.prefills.values(), *self.prefilling):
            prefill.end()

    def end(self, response: Response | None) -> None:
        """Stops all work for this request. Only the first call counts.

        `response`: for the client; None if the client has left.
        """
        if not self._ended:
            self._ended = True
            self.final_response = response
            self.lifetime.cancel()


class Prefill(Attempt):
    """The prefill of one prompt for one ticket, and what has become of the ticket. The task that serves the ticket owns
    it; others call its methods."""

    def __init__(
        self, request: ProxiedRequest, prompt: int, failures: Sequence[Failure], is_evidence: bool = True
    ) -> None:
        """
        Args:
            request: that the decode engine has posted the ticket for.
            prompt: the number of the prompt in the request.
            failures: of the same prompt's prefills under earlier attempts at decode.
            is_evidence: whether a decode engine certainly posted the ticket. False: a client may have made it up.
        """
        super().__init__()
        self.request = request
        self.group = request
        self.is_evidence = is_evidence
        self.request_id = request.request_id
        """Of the attempt at decode, as the engine there. The request itself may go on to another attempt."""
        self.decode_engine = request.engine
        """URL of the engine that has posted the ticket."""
        self.prompt = prompt
        self.posted_at = time.monotonic()
        self.failures = list(failures)
        """Why prefills of this prompt failed, under earlier attempts at decode, too. Each sample has its own list."""
        self.is_started = False
        """Whether an earlier post has started the prefill. A ticket has only one, however often it is posted."""
        self.answer: Response | None = None
        """What the decode engine is told when the prefill has ended. None if nobody waits for that."""
        self.answered = False
        """Whether the decode engine has got a 200 for the ticket. It then waits for the KV only."""
        self.given_up = False
        """Whether the decode engine has reported that it waits for the KV no longer."""
        self.recomputes = False
        """Whether the decode engine computes the prompt itself if the KV does not come."""
        self.is_recorded = False
        """Whether what became of the prefill and its transfer was recorded. Only the first result counts."""
        self.is_over = False
        """Whether nobody waits for it any more. What becomes of it then does not concern the request."""
        self.posts = 0
        """Posts of the ticket that wait for the answer."""
        self._ended: anyio.Event | None = None
        """Set when the prefill has ended. None if nobody waits for that."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """The time in which the ticket is prefilled."""
        self.is_started = True
        request, prefilling = self.request, self.request.prefilling
        prefilling.add(self)
        try:
            yield
        finally:
            prefilling.discard(self)
            if not (self.is_over or math.isinf(request.silent_since)):
                request.silent_since = time.monotonic()  # decode had nothing to compute meanwhile
            if self._ended is not None:
                self._ended.set()

    async def wait(self) -> None:
        """Returns when the prefill, which was started, has ended."""
        if self in self.request.prefilling:
            self._ended = self._ended or anyio.Event()
            await self._ended.wait()

    def failed(self, failure: Failure) -> None:
        """Records why it failed. That counts for tickets of later attempts at decode, too."""
        request = self.request
        self.failures.append(failure)
        known = request.prefill_failures.get(self.prompt, [])
        request.prefill_failures[self.prompt] = max(known, self.failures, key=len)
        rule = RULES[EngineRole.PREFILL, failure.kind]
        if rule.counts is Counts.YES or rule.asks is Asks.NONE:
            request.failed_prefill_urls.add(failure.url)

    def end(self) -> None:
        """Nobody waits for the KV any more."""
        self.is_over = True
        if self.scope is not None:
            self.scope.cancel()


class RequestTable:
    """Admits client requests, and holds those that are on their way.

    The event loop's thread owns it.
    """

    def __init__(self, limit: int, queue_length: int = 0, timeout: float = 0.0) -> None:
        """
        Args:
            limit: requests that are served at a time.
            queue_length: how many more may wait.
            timeout: seconds that a request waits before it is refused.
        """
        self.queue: Queue[HasSlots] = Queue(limit, queue_length, timeout)
        self._lookups: Queue[HasSlots] = Queue(_LOOKUPS, queue_length, timeout)
        """Of GET requests: they wait for each other alone, not for what engines compute."""
        self._proxy = {queue: (HasSlots(),) for queue in (self.queue, self._lookups)}
        """Whose slots each queue gives: the proxy's own."""
        self._open: set[ProxiedRequest] = set()
        """Requests being served, and those that wait for that."""
        self._attempts: dict[str, ProxiedRequest] = {}
        """Those with an attempt at decode, by the attempt's id."""
        self._posts: set[anyio.CancelScope] = set()
        """Other bodies that are being read."""
        self._large_bodies = Turns(1)
        self._closed = False
        """Whether the proxy shuts down."""

    @property
    def in_flight(self) -> int:
        """Number of requests being served, those whose bodies are still arriving included."""
        return len(self._open) - self.queue.waiting - self._lookups.waiting

    def phases(self) -> Mapping[RequestPhase, int]:
        """Number of requests in each phase. The sum is `in_flight`."""
        counted = Counter(request.phase for request in self._attempts.values())
        counted[RequestPhase.ARRIVING] = self.in_flight - counted.total()
        return {phase: counted[phase] for phase in RequestPhase}

    @owned
    @contextmanager
    def open(self, request: ProxiedRequest) -> Iterator[None]:
        """A new request, for the time of the `with` block. Raises RequestRefused: 429 if the queue is full, 503 if the
        proxy shuts down."""
        if self._closed:
            raise _shutting_down()
        queue = self._queue(request)
        try:
            queue.check(self._proxy[queue])
        except NoFreeSlotError as full:
            raise _full(queue, full) from None
        self._open.add(request)
        try:
            yield
        finally:
            self._open.discard(request)

    @owned
    @asynccontextmanager
    async def slot(self, request: ProxiedRequest) -> AsyncIterator[None]:
        """The time in which a request is served. It asks for a slot when its body has arrived: a client that sends none
        keeps no slot from others. Raises RequestRefused (429) if the queue is full, or no slot became free in time."""
        queue = self._queue(request)
        try:
            proxy = await queue.acquire(self._proxy[queue])
        except NoFreeSlotError as full:
            raise _full(queue, full) from None
        assert proxy is not None
        try:
            yield
        finally:
            queue.release(proxy)

    def _queue(self, request: ProxiedRequest) -> Queue[HasSlots]:
        return self._lookups if request.method == "GET" else self.queue

    @owned
    @contextmanager
    def attempt(self, request: ProxiedRequest) -> Iterator[None]:
        """A new attempt at having decode answer a request. It ends with the `with` block, and its prefills end too."""
        # Never the client's own id: tickets are matched by it, so it must be unique and hard to guess.
        request_id = str(uuid.uuid4())
        request.begin(request_id)
        self._attempts[request_id] = request
        try:
            yield
        finally:
            del self._attempts[request_id]
            request.end_attempt()

    @owned
    def find(self, engine_request_id: str) -> tuple[ProxiedRequest, ClientRequest, int, bool]:
        """Finds what a decode engine's post is about, by that engine's name for its request.

        Returns the request, its body, the number of the prompt, and whether it is one of several samples, which each
        have an id of their own. Raises RequestRefused (404) if there is none.
        """
        request = self._attempts.get(uuid_in(engine_request_id))
        parsed = None if request is None else request.parsed
        found = None if parsed is None else prompt_number(parsed.endpoint, engine_request_id)
        if request is None or parsed is None or found is None or found[0] >= len(parsed.prompts):
            raise RequestRefused(HTTPStatus.NOT_FOUND, "no request is waiting under this request_id")
        return request, parsed, *found

    async def await_decoding(self, body: bytes | bytearray) -> None:
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
                body = bytes(await read_body(request.stream(), limit))
                await self.await_decoding(body)
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
        for request in self._open:
            request.end(_shutting_down().response())
        for scope in self._posts:
            scope.cancel()


def _full(queue: Queue[HasSlots], error: NoFreeSlotError) -> RequestRefused:
    waiting = f"{queue.length} more wait, which is the limit"
    if error.timed_out:
        waiting = f"{queue.waiting} more wait, and this one has waited {queue.timeout:g} s"
    return RequestRefused(
        HTTPStatus.TOO_MANY_REQUESTS, f"the proxy serves {queue.limit} requests, {waiting}: retry later"
    )


def _shutting_down() -> RequestRefused:
    return RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, "the proxy is shutting down")
