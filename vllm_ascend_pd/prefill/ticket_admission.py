# SPDX-License-Identifier: Apache-2.0
"""Decides which tickets prefill serves."""

import hashlib
import time
from collections import Counter

from vllm_ascend_pd.core.bounds import MAX_TICKET_LIFETIME_S
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signing import CLOCK_SKEW_S, verify
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket, TicketError

MAX_REMEMBERED = 1 << 20
"""How many tickets that have not expired are remembered: about 90 MB.

With the default `queue_timeout_s` these are 283 requests per second.
"""
_FORGET_S = 64
"""Length of an expiry bucket, in seconds. Its tickets are forgotten together."""
MAX_UNPROVEN = 1024
"""How many decode engines may have open tickets that no KV was ever delivered to.

Each engine takes a thread and a connection of every rank.
"""
_MAX_PROVEN = 4096


class TicketAdmission:
    """Decides which tickets are served, and remembers those that were. Used by the scheduler's thread alone.

    hosts: the hosts that prefill may connect to.
    secret: the cluster's secret. None: tickets need no signature.
    """

    def __init__(self, hosts: HostList, secret: Secret | None = None) -> None:
        self._hosts = hosts
        self._secret = secret
        self._clock = time.time
        # Digests of tickets served, by expiry bucket. A ticket that comes again has the same expiry,
        # since that is signed.
        self._seen: dict[int, set[bytes]] = {}
        # How many digests `_seen` has.
        self._remembered = 0
        # Issuer -> how many of its tickets are being served.
        self._open: Counter[tuple[str, str]] = Counter()
        # Issuers that KV was delivered to, in the order of the last delivery.
        self._proven: dict[tuple[str, str], None] = {}

    def check(self, ticket: Ticket) -> None:
        """Checks a ticket that is not served yet. Remembers nothing, so any thread may call it. Raises TicketError."""
        if (reason := self._hosts.refusal(ticket.remote_host, ticket.remote_port)) is not None:
            raise TicketError(f"the ticket's {reason}")
        if self._secret is not None:
            verify(ticket, self._secret)

    @owned
    def admit(self, ticket: Ticket) -> None:
        """Admits a ticket, once. `release` must follow. Raises TicketError if the ticket is not served."""
        self.check(ticket)
        if self._secret is None:
            self._check_issuer(ticket)
        else:
            self._remember(ticket)
        self._open[ticket.issuer] += 1

    @owned
    def release(self, ticket: Ticket, delivered: bool) -> None:
        """Records that an admitted ticket is no longer served. `delivered`: whether all its KV was sent."""
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
                f"{MAX_UNPROVEN} decode engines have tickets though nothing was ever delivered to them: too many"
            )

    def _remember(self, ticket: Ticket) -> None:
        """Remembers a signed ticket. Raises TicketError if it has expired, expires too late, or was admitted before."""
        now = self._clock()
        if now >= ticket.expires_at + CLOCK_SKEW_S:
            raise TicketError(
                f"the ticket expired {now - ticket.expires_at:.0f} s ago: did the request wait that long, or do the "
                "clocks of decode and prefill differ?"
            )
        if ticket.expires_at > now + MAX_TICKET_LIFETIME_S + CLOCK_SKEW_S:
            raise TicketError(
                "the ticket expires more than a day from now: do the clocks of decode and prefill differ?"
            )
        for bucket in [each for each in self._seen if (each + 1) * _FORGET_S + CLOCK_SKEW_S <= now]:
            self._remembered -= len(self._seen.pop(bucket))
        seen = self._seen.setdefault(ticket.expires_at // _FORGET_S, set())
        key = hashlib.blake2b(ticket.ticket_id.encode(), digest_size=16).digest()
        if key in seen:
            raise TicketError("the ticket was used before: a replay")
        if self._remembered >= MAX_REMEMBERED:
            raise TicketError(f"{MAX_REMEMBERED} tickets that have not expired were served: no more can be remembered")
        seen.add(key)
        self._remembered += 1
