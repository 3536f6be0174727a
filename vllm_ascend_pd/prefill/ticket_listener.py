# SPDX-License-Identifier: Apache-2.0
"""Takes decode's tickets for held prompts, on a thread of its own (`pd-ticket-listener`).

The thread answers at once and keeps the tickets, under one lock. The scheduler's thread looks at them in its steps, and
says what has become of each. An idle engine runs no scheduler, so a ticket that has waited too long is refused here,
when decode asks.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_ascend_pd.core.bounds import (
    EMPTY_LIST_COST,
    MAX_WAITING_BLOCKS,
    MAX_WAITING_OFFERS,
    MAX_WAITING_RELEASES,
)
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
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.step import rank_address
from vllm_ascend_pd.core.ticket import Ticket, TicketError
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer
from vllm_ascend_pd.transport.wakeup import WakeupSender, new_address

EARLY_S = 30.0
"""How long a ticket or a release waits for its prompt. Routers that ask both sides at once send both within moments."""

NO_PROMPT = f"for {EARLY_S:g} s no prompt of the ticket's transfer_id wanted it"
"""Why a ticket is refused that has waited so long, unless it fitted none of the prompts that were there."""

# Tickets that are remembered after their end, and transfer ids whose prompts were freed without a ticket.
_MAX_REMEMBERED = 4096
# Messages of a connection that wait to be read. A ticket may be large, and decode asks again.
_UNREAD_TICKETS = 32


class Fate(Enum):
    """What has become of a ticket."""

    WAITING = auto()
    SERVED = auto()
    REFUSED = auto()
    # The ranks have ended with it, or decode has released its prompt. Nothing has an effect on it any more.
    OVER = auto()


@dataclass
class OfferedTicket:
    """A ticket that decode has offered, or whose prompt it has released. It changes under the listener's lock."""

    ticket_id: str
    # What decode sent. None: nothing waits for the scheduler any more.
    message: OfferTicket | ReleasePrompt | None
    # Until when it waits for its prompt, on the monotonic clock.
    expires_at: float
    fate: Fate = Fate.WAITING
    # Why the ticket is not served, or will not be at `expires_at`.
    reason: str = NO_PROMPT
    # The scheduler's: requests whose prompts the ticket does not fit.
    tried: set[str] = field(default_factory=set)
    # The host that sent the message.
    peer: str = ""


class _Room:
    """What waits of one kind, in all and of each host. The sums are kept, not computed.

    A host may have as much waiting as is left for all others. So one host alone gets half, and the next one finds room.
    A single message gets no more than that either.
    """

    def __init__(self, size: int) -> None:
        self._left = size
        self._half = size // 2
        self._of: Counter[str] = Counter()

    def has_room(self, peer: str, amount: int = 1) -> bool:
        return amount <= self._half and self._of[peer] + amount <= self._left

    def add(self, peer: str, amount: int = 1) -> None:
        self._left -= amount
        self._of[peer] += amount

    def remove(self, peer: str, amount: int = 1) -> None:
        self._left += amount
        self._of[peer] -= amount
        if not self._of[peer]:
            del self._of[peer]


class TicketListener:
    """Answers decode engines, and keeps their tickets.

    engine_id: of this start of the engine. Messages for another one are refused.
    configured_id: the engine's id without what is new with each start. Those who do not know the start name it so.
    check: raises TicketError for tickets that must not even wait, such as those without a signature.
    secret, hosts: as `SideChannelServer` has them.
    ranks: (pipeline stage, rank in it) of the engine's ranks, which are woken when something comes.
    """

    def __init__(
        self,
        engine_id: str,
        host: str,
        port: int,
        check: Callable[[Ticket], None] = lambda ticket: None,
        secret: Secret | None = None,
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
        self._clock = time.monotonic
        self._lock = threading.Lock()
        # Both threads change these under the lock. By ticket id.
        self._tickets: dict[str, OfferedTicket] = {}
        # Those of them that wait for the scheduler, in the order in which they came.
        self._waiting: dict[str, OfferedTicket] = {}
        self._offers = _Room(MAX_WAITING_OFFERS)
        self._blocks = _Room(MAX_WAITING_BLOCKS)
        self._releases = _Room(MAX_WAITING_RELEASES)
        # Ids of those of them that neither wait nor are served, the oldest first.
        self._ended: dict[str, None] = {}
        # Transfer ids whose prompts were freed without a ticket -> why, the oldest first.
        self._freed: dict[str, str] = {}
        # Transfer ids of tickets that have not come -> when decode asked about one last, the oldest first.
        self._asked: dict[str, float] = {}
        self._server = SideChannelServer(
            host,
            port,
            self._handle,
            name="pd-ticket-listener",
            secret=secret,
            hosts=hosts,
            max_message_bytes=MAX_TICKET_BYTES,
            unread_requests=_UNREAD_TICKETS,
        )
        self.endpoint = self._server.endpoint
        self.port = int(self.endpoint.rsplit(":", 1)[1])

    # On the scheduler's thread.

    @property
    def has_waiting(self) -> bool:
        """Whether something waits for the scheduler."""
        return bool(self._waiting)

    @contextmanager
    def waiting(self) -> Iterator[list[OfferedTicket]]:
        """Yields what waits for the scheduler, in the order in which it came. Meanwhile nothing else changes it."""
        with self._lock:
            self._refuse_all_late()
            yield list(self._waiting.values())

    def settle(self, ticket: OfferedTicket, fate: Fate, reason: str = "") -> None:
        """Says what has become of a ticket that `waiting` yields."""
        self._stop_waiting(ticket)
        ticket.fate, ticket.reason = fate, reason
        if fate is not Fate.SERVED:
            self._ended[ticket.ticket_id] = None
        if len(self._ended) > _MAX_REMEMBERED:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._tickets[oldest]

    def refuse(self, transfer_id: str, reason: str) -> None:
        """Refuses all tickets for prompts of `transfer_id`, which were freed, until `prompt_came`."""
        with self._lock:
            self._freed[transfer_id] = reason
            if len(self._freed) > _MAX_REMEMBERED:
                del self._freed[next(iter(self._freed))]
            for ticket in list(self._waiting.values()):
                if isinstance(ticket.message, OfferTicket) and ticket.message.transfer_id == transfer_id:
                    self.settle(ticket, Fate.REFUSED, reason)

    def prompt_came(self, transfer_id: str) -> None:
        """A prompt of `transfer_id` has come, which tickets may be for."""
        with self._lock:
            self._freed.pop(transfer_id, None)

    def asked_at(self, transfer_id: str) -> float | None:
        """Returns when decode last asked about a ticket for a prompt of `transfer_id` that has not come, on the
        monotonic clock. None: it has not asked."""
        with self._lock:
            return self._asked.get(transfer_id)

    def end(self, ticket_id: str, failure: str | None = None) -> None:
        """The ranks have ended with a ticket, which may not have come over this listener. `failure`: why it ends before
        they have heard of it, which they can tell nobody."""
        with self._lock:
            if (ticket := self._tickets.get(ticket_id)) is not None:
                self.settle(ticket, Fate.OVER if failure is None else Fate.REFUSED, failure or "")

    def close(self, timeout_s: float) -> None:
        with ExitStack() as closing:
            closing.callback(self._wakeup.close)
            closing.callback(self._server.close, timeout_s)

    # On the listener's thread.

    def _handle(self, message: Message, peer: ClientConnection) -> Message:
        if not isinstance(message, OfferTicket | AskTicket | ReleasePrompt):
            return Problem(f"this port takes tickets, not {type(message).__name__}")
        if message.engine_id not in self._names:
            return TicketRefused(f"engine {message.engine_id} is not here; this is {self._engine_id}", retry=False)
        if isinstance(message, OfferTicket):
            return self._offered(message, peer.host)
        with self._lock:
            known = self._tickets.get(message.ticket_id)
            if isinstance(message, ReleasePrompt):
                return self._released(message, known, peer.host)
            if known is None and (reason := self._freed.get(message.transfer_id)) is not None:
                return TicketRefused(reason, retry=False)
            if known is None:
                self._asked.pop(message.transfer_id, None)
                self._asked[message.transfer_id] = self._clock()
                if len(self._asked) > _MAX_REMEMBERED:
                    del self._asked[next(iter(self._asked))]
            if known is None or known.fate is Fate.OVER:
                return TicketRefused("the ticket is not known here", retry=True)
            return self._answer(known)

    def _offered(self, offer: OfferTicket, peer: str) -> TicketTaken | TicketRefused:
        ticket = offer.ticket
        with self._lock:
            if (known := self._tickets.get(ticket.ticket_id)) is not None:
                return self._answer(known)
        try:
            self._check(ticket)  # may take long: the scheduler must not wait for it. Only this thread adds tickets.
        except TicketError as error:
            return TicketRefused(str(error), retry=False)
        cost = _cost(ticket)
        with self._lock:
            self._refuse_all_late()
            if not (self._offers.has_room(peer) and self._blocks.has_room(peer, cost)):
                return TicketRefused("too many tickets wait for their prompts", retry=True)
            offered = OfferedTicket(ticket.ticket_id, offer, self._clock() + EARLY_S, peer=peer)
            self._add(offered)
            if (reason := self._freed.get(offer.transfer_id)) is not None:
                self.settle(offered, Fate.REFUSED, reason)
            return self._answer(offered)

    def _released(self, release: ReleasePrompt, known: OfferedTicket | None, peer: str) -> Acknowledged | TicketRefused:
        if known is not None and known.fate in (Fate.SERVED, Fate.OVER):
            return Acknowledged()
        self._refuse_all_late()
        if not self._releases.has_room(peer):
            return TicketRefused("too many messages wait", retry=True)
        # A refused ticket had all prompts that it may be for. If it fitted none, they have other tokens than decode's.
        wait_s = EARLY_S if known is None or known.fate is Fate.WAITING else 0.0
        if known is not None:
            self._stop_waiting(known)
        self._add(OfferedTicket(release.ticket_id, release, self._clock() + wait_s, Fate.OVER, peer=peer))
        return Acknowledged()

    def _add(self, ticket: OfferedTicket) -> None:
        self._tickets[ticket.ticket_id] = self._waiting[ticket.ticket_id] = ticket
        self._ended.pop(ticket.ticket_id, None)  # what waits is not forgotten
        if isinstance(ticket.message, OfferTicket):
            self._offers.add(ticket.peer)
            self._blocks.add(ticket.peer, _cost(ticket.message.ticket))
        else:
            self._releases.add(ticket.peer)
        for address in self._ranks:
            self._wakeup.wake(address)

    def _stop_waiting(self, ticket: OfferedTicket) -> None:
        if ticket.message is None:
            return
        del self._waiting[ticket.ticket_id]
        if isinstance(ticket.message, OfferTicket):
            self._offers.remove(ticket.peer)
            self._blocks.remove(ticket.peer, _cost(ticket.message.ticket))
        else:
            self._releases.remove(ticket.peer)
        ticket.message = None

    def _refuse_all_late(self) -> None:
        for ticket in list(self._waiting.values()):
            self._refuse_late(ticket)

    def _refuse_late(self, ticket: OfferedTicket) -> None:
        if ticket.fate is Fate.WAITING and self._clock() >= ticket.expires_at:
            self.settle(ticket, Fate.REFUSED, ticket.reason)

    def _answer(self, ticket: OfferedTicket) -> TicketTaken | TicketRefused:
        self._refuse_late(ticket)
        return TicketRefused(ticket.reason, retry=False) if ticket.fate is Fate.REFUSED else TicketTaken()


def _cost(ticket: Ticket) -> int:
    """Returns what the ticket's lists take in memory, counted in block ids."""
    return sum(EMPTY_LIST_COST + len(ids) for ids in ticket.remote_block_ids)
