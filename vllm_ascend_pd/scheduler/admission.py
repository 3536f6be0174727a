# SPDX-License-Identifier: Apache-2.0
"""Which tickets prefill serves: those for hosts it may connect to and, with a cluster secret, only those that were
signed, have not expired and did not come before; without one, those of few engines at a time that may be made up."""

import heapq
import time
from collections import Counter
from collections.abc import Callable

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.signing import CLOCK_SKEW_S, Secret, verify
from vllm_ascend_pd.core.ticket import Ticket, TicketError

MAX_REMEMBERED = 1 << 17
"""Tickets that have not expired: with the default `transfer_timeout_s`, those of 257 requests per second. About
30 MB."""
MAX_UNPROVEN = 1024
"""Decode engines with open tickets, none of which was ever delivered: each takes a thread and a connection of every
rank."""
_MAX_PROVEN = 4096


class Admission:
    """`clock` gives unix seconds."""

    def __init__(
        self,
        hosts: HostList,
        secret: Secret | None = None,
        capacity: int = MAX_REMEMBERED,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._hosts = hosts
        self._secret = secret
        self._capacity = capacity
        self._clock = clock
        self._seen: set[tuple[str, int]] = set()
        self._expiries: list[tuple[float, tuple[str, int]]] = []  # a heap
        self._open: Counter[tuple[str, str]] = Counter()  # tickets, by issuer
        self._proven: dict[tuple[str, str], None] = {}  # issuers, the one last delivered to last

    def admit(self, ticket: Ticket) -> None:
        """Once per ticket and attempt; `ended` must follow. Raises TicketError saying why it is not served."""
        if (reason := self._hosts.refusal(ticket.remote_host)) is not None:
            raise TicketError(f"the ticket's {reason}")
        if self._secret is None:
            self._check_issuer(ticket)
        else:
            self._check_signature(ticket, self._secret)
        self._open[ticket.issuer] += 1

    def ended(self, ticket: Ticket, delivered: bool) -> None:
        """Nothing is done for an admitted ticket any more."""
        self._open[ticket.issuer] -= 1
        if not self._open[ticket.issuer]:
            del self._open[ticket.issuer]
        if delivered:
            self._proven.pop(ticket.issuer, None)
            self._proven[ticket.issuer] = None
            if len(self._proven) > _MAX_PROVEN:
                del self._proven[next(iter(self._proven))]

    def _check_issuer(self, ticket: Ticket) -> None:
        if ticket.issuer in self._open or ticket.issuer in self._proven:
            return
        if sum(issuer not in self._proven for issuer in self._open) >= MAX_UNPROVEN:
            raise TicketError(
                f"{MAX_UNPROVEN} decode engines that nothing was ever delivered to have tickets: too many"
            )

    def _check_signature(self, ticket: Ticket, secret: Secret) -> None:
        verify(ticket, secret)
        now = self._clock()
        if now >= ticket.expires_at + CLOCK_SKEW_S:
            raise TicketError(
                f"the ticket expired {now - ticket.expires_at:.0f} s ago: did the request wait that long, or do the "
                "clocks of decode and prefill differ?"
            )
        self._forget_expired(now)
        key = (ticket.ticket_id, ticket.attempt)
        if key in self._seen:
            raise TicketError("the ticket was used before: a replay")
        if len(self._seen) >= self._capacity:
            raise TicketError(f"{self._capacity} tickets that have not expired were served: no more can be remembered")
        self._seen.add(key)
        heapq.heappush(self._expiries, (ticket.expires_at + CLOCK_SKEW_S, key))

    def _forget_expired(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            self._seen.discard(heapq.heappop(self._expiries)[1])
