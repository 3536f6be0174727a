# SPDX-License-Identifier: Apache-2.0
"""One attempt at answering a client's request by a decode engine, and the tickets that the engine posts for it."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio
from starlette.responses import Response

from vllm_ascend_pd.proxy.http.headers import Headers, decode_request_headers, prefill_request_headers
from vllm_ascend_pd.proxy.rendezvous.observer import Span
from vllm_ascend_pd.proxy.routing.answers import Failure
from vllm_ascend_pd.proxy.routing.engine_pool import EngineCall


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


class TicketProgress:
    """How far the prefill of one ticket has come. The task that serves the ticket owns it; others call its methods."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        """`failures`: of the same prompt's prefills under earlier decode attempts."""
        self.failures = list(failures)
        """Why prefills of this prompt failed, under earlier decode attempts too. Each sample has its own list."""
        self.call = EngineCall()
        """The prefill request."""
        self.answered = False
        """Whether the decode engine has got a 200 for the ticket. It then waits for the KV only."""
        self.given_up = False
        """Whether the decode engine waits for the KV no longer."""
        self.left = False
        """Whether the decode engine has closed the connection on which it waited, and not posted the ticket again."""
        self.recomputes = False
        """Whether the decode engine computes the prompt itself if the KV does not come."""
        self.ended = anyio.Event()
        """Set when the prefill has ended."""
        self.answer: Response | None = None
        """What the decode engine is told then. None if the prefill was cancelled."""
        self._prefill: anyio.CancelScope | None = None
        """The work on the ticket; None before the first post."""
        self._waiting = 0
        """Posts of the ticket that wait for the answer."""

    @property
    def begun(self) -> bool:
        """Whether an earlier post has begun the prefill. A ticket has only one, however often it is posted."""
        return self._prefill is not None

    def begin(self, prefill: anyio.CancelScope) -> None:
        """The prefill begins. Cancelling `prefill` ends it."""
        self._prefill = prefill

    def waits(self) -> None:
        """A post waits for the answer from now on."""
        self._waiting += 1
        self.left = False

    def lost(self) -> None:
        """The connection of a post that waited was closed."""
        self._waiting -= 1
        self.left = not self._waiting

    def give_up(self) -> None:
        """The decode engine has reported that it does not wait for the KV any longer."""
        self.given_up = True

    def cancel(self) -> None:
        """Nobody waits for the KV any more."""
        if self._prefill is not None:
            self._prefill.cancel()


class DecodeAttempt(EngineCall):
    """A client's request at one decode engine, under an id of its own.

    The task that serves the client changes it, and so do the metaserver's modules, by the methods below.
    """

    def __init__(
        self, request_id: str, span: Span, client_headers: Headers, alone: bool, may_follow: Callable[[], bool]
    ) -> None:
        """
        Args:
            request_id: unique. The engine's names for its requests contain it.
            span: of this attempt.
            client_headers: the headers of the client's request.
            alone: whether decode answers without prefill, so that no ticket will come.
            may_follow: tells whether another attempt is allowed if this one gets no KV.
        """
        super().__init__()
        self.request_id = request_id
        self.span = span
        self.decode_headers = span.onto(decode_request_headers(client_headers, request_id))
        """Headers of the request to the decode engine."""
        self.prefill_headers = prefill_request_headers(self.decode_headers)
        """Headers of the requests to prefill engines."""
        self.alone = alone
        self.without_prefill = False
        """Whether decode was told that no prefill engine is well."""
        self.answering = False
        """Whether the client has got a part of the response. Then no other engine can answer any more."""
        self.over = False
        """Whether the attempt has ended or was given up. Its prefills end too."""
        self.tickets: dict[tuple[int, str], TicketProgress] = {}
        """By the number of the prompt, and the ticket's id. Of tickets without an id, the last one."""
        self.prefilled_at: float | None = None
        """When the first prefill of a prompt succeeded, on `time.monotonic`'s clock."""
        self.transfer_failed = anyio.Event()
        """Set together with `transfer_failure`."""
        self.transfer_failure: Failure | None = None
        """The first reason why KV did not come. The decode engine's own answer does not contain it."""
        self._failed_ticket: TicketProgress | None = None
        """The ticket with this failure. None: it is the whole request's."""
        self._may_follow = may_follow
        self._prefills: set[anyio.CancelScope] = set()
        """Prefills of tickets."""

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
        if not self.engines:
            return RequestPhase.QUEUED
        if self._prefills:
            return RequestPhase.PREFILL
        return RequestPhase.DECODE if self.prefilled_at is None else RequestPhase.TRANSFER

    @property
    def may_report(self) -> bool:
        """Whether the decode engine may still report why KV did not come. Other connectors never report that."""
        return any(ticket_id for _, ticket_id in self.tickets)

    @property
    def may_begin_anew(self) -> bool:
        """Whether another attempt may replace this one: it is allowed, and the client has got nothing yet."""
        return not self.answering and self._may_follow()

    def ticket(
        self, prompt: int, ticket_id: str, failures: Sequence[Failure], samples: int, replaces: str = ""
    ) -> TicketProgress | None:
        """Registers a ticket that the decode engine posts, for the first time or again.

        Args:
            prompt: the number of the prompt.
            ticket_id: empty for tickets of other connectors, which are not matched with earlier posts.
            failures: as in TicketProgress.
            samples: how many tickets the prompt may have at a time.
            replaces: the id of the ticket whose place this one takes. Empty if there is none.

        Returns:
            The ticket's progress, or None if the prompt has all its tickets already, under other ids.
        """
        if not ticket_id:
            self.tickets[prompt, ""] = unnamed = TicketProgress(failures)
            return unnamed
        progress = self.tickets.get((prompt, ticket_id))
        if progress is None:
            if replaces and (replaced := self.tickets.pop((prompt, replaces), None)) is not None:
                failures = self._end_replaced(replaced)
            if sum(of == prompt for of, _ in self.tickets) >= samples:
                return None
            progress = self.tickets[prompt, ticket_id] = TicketProgress(failures)
        return progress

    def _end_replaced(self, ticket: TicketProgress) -> Sequence[Failure]:
        """Ends a ticket whose place another one takes. Returns the failures that the other one inherits: none if the
        KV had come, since decode has gone on from there."""
        ticket.cancel()
        if self._failed_ticket is ticket:
            self.transfer_failure, self._failed_ticket = None, None
            self.transfer_failed = anyio.Event()
        return () if ticket.answered and not ticket.given_up else ticket.failures

    @contextmanager
    def prefill(self) -> Iterator[anyio.CancelScope]:
        """The time in which a ticket is prefilled. Yields a scope that is cancelled when the attempt ends."""
        with anyio.CancelScope() as scope:
            self._prefills.add(scope)
            try:
                yield scope
            finally:
                self._prefills.discard(scope)
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
        for scope in self._prefills:
            scope.cancel()
