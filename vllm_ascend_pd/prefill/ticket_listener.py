# SPDX-License-Identifier: Apache-2.0
"""Takes decode's tickets for prompts that a router asked prefill for first, on a thread of its own (`pd-tickets`).

The thread answers at once and keeps the tickets, under one lock. The scheduler's thread looks at them in its steps, and
says what has become of each. Tickets that wait too long end here: an idle engine runs no scheduler.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.protocol import (
    MAX_TICKET_BYTES,
    Acknowledged,
    AskTicket,
    Message,
    OfferTicket,
    Problem,
    ReleasePrompt,
    TicketRefused,
    TicketTaken,
)
from vllm_ascend_pd.core.step import rank_address
from vllm_ascend_pd.core.ticket import Ticket, TicketError
from vllm_ascend_pd.transport.keys import Keys
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer
from vllm_ascend_pd.transport.wakeup import WakeupSender, new_address

EARLY_S = 30.0
"""How long a ticket waits for its prompt. Routers that ask both sides at once send both within moments."""

NO_PROMPT = f"no request with the ticket's transfer_id came within {EARLY_S:g} s"
"""Why a ticket is refused that has waited so long."""

# Tickets that wait for their prompt or for the scheduler, and as many releases. vLLM runs fewer requests at a time.
_MAX_WAITING = 1024
# Block ids in all of these tickets together: 64 MB.
_MAX_WAITING_BLOCKS = 1 << 20
# Tickets that are remembered after their end.
_MAX_REMEMBERED = 4096
# Messages of a connection that wait to be read. A ticket may be large, and decode asks again.
_UNREAD_TICKETS = 32
# Seconds between two looks at tickets that wait too long.
_LOOK_S = 0.5


class Fate(Enum):
    """What has become of a ticket."""

    WAITING = auto()
    # The ranks serve it, or have ended with it.
    SERVED = auto()
    ENDED = auto()
    # It is not served: prefill refuses it, or decode has said that none will come.
    REFUSED = auto()
    RELEASED = auto()


@dataclass
class OfferedTicket:
    """A ticket that decode has offered, or whose prompt it has released."""

    ticket_id: str
    # What decode sent. None: nothing waits for the scheduler any more.
    message: OfferTicket | ReleasePrompt | None
    # On the monotonic clock.
    came_at: float
    # These three change under the listener's lock. Why the ticket is not served, or will not be at `expires_at`.
    reason: str = NO_PROMPT
    fate: Fate = Fate.WAITING
    # Until when it waits for its prompt, on the monotonic clock. None: a prompt that is there may take it.
    expires_at: float | None = None
    # The scheduler's: requests whose prompts the ticket does not fit, and why.
    tried: set[str] = field(default_factory=set)
    misfit: str | None = None


class TicketListener:
    """Answers decode engines, and keeps their tickets.

    engine_id: of this start of the engine. Messages for another one are refused.
    configured_id: the engine's id without what is new with each start. Those who do not know the start name it so.
    check: raises TicketError for tickets that must not even wait, such as those without a signature.
    keys, hosts: as `SideChannelServer` has them.
    ranks: (pipeline stage, rank in it) of the engine's ranks, which are woken when something comes.
    """

    def __init__(
        self,
        engine_id: str,
        host: str,
        port: int,
        check: Callable[[Ticket], None] = lambda ticket: None,
        keys: Keys | None = None,
        hosts: HostList | None = None,
        configured_id: str | None = None,
        ranks: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Starts the thread. `port`: 0 picks a free one. Raises SideChannelError if it cannot listen on it."""
        self.host = host
        self._engine_id = engine_id
        self._names = {engine_id, configured_id}
        self._check = check
        # Wakes the ranks when something comes, as in `PrefillStep`.
        self.wakeup_address = new_address()
        self._ranks = [rank_address(self.wakeup_address, *rank) for rank in ranks]
        self._wakeup = WakeupSender()
        self._look_at = 0.0
        self._clock = time.monotonic
        self._lock = threading.Lock()
        # Both threads change these under the lock. By ticket id.
        self._tickets: dict[str, OfferedTicket] = {}
        # Ids of those of them that neither wait nor are served, the oldest first.
        self._over: dict[str, None] = {}
        self._server = SideChannelServer(
            host,
            port,
            self._handle,
            self._tick,
            name="pd-tickets",
            keys=keys,
            hosts=hosts,
            max_message_bytes=MAX_TICKET_BYTES,
            unread_requests=_UNREAD_TICKETS,
        )
        self.endpoint = self._server.endpoint
        self.port = int(self.endpoint.rsplit(":", 1)[1])

    # On the scheduler's thread.

    def waiting(self) -> list[OfferedTicket]:
        """Returns what waits for the scheduler, in the order in which it came."""
        with self._lock:
            return [ticket for ticket in self._tickets.values() if ticket.message is not None]

    def wait_until(self, ticket: OfferedTicket, expires_at: float | None, reason: str = "") -> bool:
        """Sets until when a ticket waits, and why it is refused then. Returns False if it does not wait any more."""
        with self._lock:
            if ticket.fate is not Fate.WAITING:
                return False
            ticket.expires_at, ticket.reason = expires_at, reason
            return True

    def settle(self, ticket: OfferedTicket, fate: Fate, reason: str = "") -> None:
        """Says what has become of a ticket that waited."""
        with self._lock:
            self._settle(ticket, fate, reason)

    def ended(self, ticket_id: str) -> None:
        """The ranks have ended with a ticket, which may not have come over this listener."""
        with self._lock:
            if (ticket := self._tickets.get(ticket_id)) is not None:
                self._settle(ticket, Fate.ENDED, "")

    def close(self, timeout_s: float) -> None:
        with ExitStack() as closing:
            closing.callback(self._wakeup.close)
            closing.callback(self._server.close, timeout_s)

    # On the listener's thread.

    def _handle(self, message: Message, peer: ClientConnection) -> Message:
        if not isinstance(message, OfferTicket | AskTicket | ReleasePrompt):
            return Problem(f"this port takes tickets, not {type(message).__name__}")
        if message.engine_id not in self._names:
            reason = f"engine {message.engine_id} is not here; this is {self._engine_id}"
            return Problem(reason) if isinstance(message, ReleasePrompt) else TicketRefused(reason, retry=False)
        with self._lock:
            if isinstance(message, OfferTicket):
                return self._offered(message)
            known = self._tickets.get(message.ticket_id)
            if isinstance(message, ReleasePrompt):
                return self._released(message, known)
            if known is None or known.fate is Fate.ENDED:
                return TicketRefused("the ticket is not known here", retry=True)
            return _answer(known)

    def _offered(self, offer: OfferTicket) -> TicketTaken | TicketRefused:
        ticket = offer.ticket
        if (known := self._tickets.get(ticket.ticket_id)) is not None:
            return _answer(known)
        if len(ticket.ticket_id) != 32:
            return TicketRefused("ticket_id is not 32 hexadecimal digits", retry=False)
        try:
            self._check(ticket)
        except TicketError as error:
            return TicketRefused(str(error), retry=False)
        waiting = [each.message.ticket for each in self._tickets.values() if isinstance(each.message, OfferTicket)]
        blocks = sum(len(ids) for each in (ticket, *waiting) for ids in each.remote_block_ids)
        if len(waiting) >= _MAX_WAITING or blocks > _MAX_WAITING_BLOCKS:
            return TicketRefused("too many tickets wait for their prompts", retry=True)
        now = self._clock()
        self._add(OfferedTicket(ticket.ticket_id, offer, now, expires_at=now + EARLY_S))
        return TicketTaken()

    def _released(self, release: ReleasePrompt, known: OfferedTicket | None) -> Acknowledged | Problem:
        if known is not None and known.fate not in (Fate.WAITING, Fate.REFUSED):
            return Acknowledged()
        if sum(isinstance(each.message, ReleasePrompt) for each in self._tickets.values()) >= _MAX_WAITING:
            return Problem("too many messages wait")
        was_refused = known is not None and known.fate is Fate.REFUSED
        # A refused ticket had all prompts that it may be for. If it fitted none, they have other tokens than decode's.
        now = self._clock()
        expires_at = now if was_refused else now + EARLY_S
        self._add(OfferedTicket(release.ticket_id, release, now, release.reason, Fate.RELEASED, expires_at))
        return Acknowledged()

    def _add(self, ticket: OfferedTicket) -> None:
        self._tickets[ticket.ticket_id] = ticket
        for address in self._ranks:
            self._wakeup.wake(address)

    def _settle(self, ticket: OfferedTicket, fate: Fate, reason: str) -> None:
        ticket.message, ticket.fate, ticket.reason = None, fate, reason
        self._tickets[ticket.ticket_id] = ticket
        if fate is not Fate.SERVED:
            self._over[ticket.ticket_id] = None
        if len(self._over) > _MAX_REMEMBERED:
            oldest = next(iter(self._over))
            del self._over[oldest], self._tickets[oldest]

    def _tick(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        with self._lock:
            for ticket in list(self._tickets.values()):
                is_over = ticket.expires_at is not None and self._clock() >= ticket.expires_at
                if ticket.fate is Fate.WAITING and is_over:
                    self._settle(ticket, Fate.REFUSED, ticket.reason)


def _answer(ticket: OfferedTicket) -> TicketTaken | TicketRefused:
    is_taken = ticket.fate in (Fate.WAITING, Fate.SERVED, Fate.ENDED)
    return TicketTaken() if is_taken else TicketRefused(ticket.reason, retry=False)
