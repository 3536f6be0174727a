# SPDX-License-Identifier: Apache-2.0
"""Which tickets prefill serves: those for hosts it may connect to and, with a cluster secret, only those that were
signed, have not expired and did not come before; without one, those of few engines at a time that may be made up."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.signing import CLOCK_SKEW_S, Secret, verify
from vllm_ascend_pd.core.ticket import Ticket, TicketError

MAX_REMEMBERED = 1 << 20
"""Tickets that have not expired: with the default `queue_timeout_s`, those of 283 requests per second. About 90 MB."""
_FORGET_S = 64
"""Seconds of expiry whose tickets are remembered, and forgotten, together."""
MAX_UNPROVEN = 1024
"""Decode engines with open tickets, none of which was ever delivered: each takes a thread and a connection of every
rank."""
_MAX_PROVEN = 4096


class TicketAdmission:
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
        self._seen: dict[int, set[bytes]] = {}
        """What was served, by its expiry in units of `_FORGET_S`: a ticket that comes again has the same one, which is
        signed."""
        self._remembered = 0
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
        seen = self._seen.setdefault(ticket.expires_at // _FORGET_S, set())
        key = hashlib.blake2b(f"{ticket.attempt} {ticket.ticket_id}".encode(), digest_size=16).digest()
        if key in seen:
            raise TicketError("the ticket was used before: a replay")
        if self._remembered >= self._capacity:
            raise TicketError(f"{self._capacity} tickets that have not expired were served: no more can be remembered")
        seen.add(key)
        self._remembered += 1

    def _forget_expired(self, now: float) -> None:
        for unit in [unit for unit in self._seen if (unit + 1) * _FORGET_S + CLOCK_SKEW_S <= now]:
            self._remembered -= len(self._seen.pop(unit))
