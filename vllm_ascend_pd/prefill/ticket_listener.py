# SPDX-License-Identifier: Apache-2.0
"""Takes decode's tickets for prompts that a router asked prefill for first, on a thread of its own (`pd-tickets`).

The thread answers at once and queues tickets for the scheduler, which posts back what has become of them.
"""

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

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
from vllm_ascend_pd.prefill.held_prompts import EARLY_S, NO_PROMPT
from vllm_ascend_pd.transport.keys import Keys
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer
from vllm_ascend_pd.transport.socket_limiter import default_limit
from vllm_ascend_pd.transport.wakeup import WakeupSender, new_address

# Tickets that wait for their prompt or for the scheduler. vLLM itself runs fewer requests at a time.
_MAX_WAITING = 1024
# Block ids in all of these tickets together: 64 MB.
_MAX_WAITING_BLOCKS = 1 << 20
# Refused tickets whose reasons are remembered.
_MAX_REFUSED = 4096
# Messages that the scheduler has not taken. It takes them in every step.
_MAX_QUEUED = 2048
# Messages of a connection that wait to be read. A ticket may be large, and decode asks again.
_UNREAD_TICKETS = 32
# One for each of 1024 decode engines.
_MAX_CONNECTIONS = 1024


# Seconds between two looks at tickets that wait too long.
_LOOK_S = 1.0
# How much longer than the scheduler this thread waits for a ticket's prompt. An idle engine runs no scheduler.
_GRACE_S = 5.0


@dataclass
class _Waiting:
    """A ticket that is not served yet."""

    # How many block ids it has.
    blocks: int
    # When it came, on the monotonic clock.
    came_at: float
    # Whether the scheduler has a request with its transfer id.
    has_prompt: bool = False


class TicketListener:
    """Implements `TicketInbox` with a side channel server.

    engine_id: of this start of the engine. Messages for another one are refused.
    configured_id: the engine's id without what is new with each start. Those who do not know the start name it so.
    check: raises TicketError for tickets that must not even wait, such as those without a signature.
    ranks: (pipeline stage, rank in it) of the engine's ranks, which are woken when something comes.
    """

    def __init__(
        self,
        engine_id: str,
        host: str,
        port: int,
        check: Callable[[Ticket], None] = lambda ticket: None,
        keys: Keys | None = None,
        configured_id: str | None = None,
        ranks: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Starts the thread. `port`: 0 picks a free one. Raises SideChannelError if it cannot listen on it."""
        self.host = host
        self._engine_id = engine_id
        self._names = {engine_id, configured_id}
        self._check = check
        self._queue: queue.Queue[OfferTicket | ReleasePrompt] = queue.Queue(_MAX_QUEUED)
        self.wakeup_address = new_address()
        self._ranks = [rank_address(self.wakeup_address, *rank) for rank in ranks]
        # The thread owns all of these. By ticket id.
        self._waiting: dict[str, _Waiting] = {}
        # Tickets that the ranks serve.
        self._served: set[str] = set()
        # Why a ticket was refused. Oldest first.
        self._refused: dict[str, str] = {}
        self._wakeup = WakeupSender()
        self._look_at = 0.0
        self._server = SideChannelServer(
            host,
            port,
            self._handle,
            self._tick,
            name="pd-tickets",
            keys=keys,
            max_connections=min(_MAX_CONNECTIONS, default_limit()),
            max_message_bytes=MAX_TICKET_BYTES,
            unread_requests=_UNREAD_TICKETS,
        )
        self.endpoint = self._server.endpoint
        self.port = int(self.endpoint.rsplit(":", 1)[1])

    # On the scheduler's thread.

    def take(self) -> list[OfferTicket | ReleasePrompt]:
        """Returns what has come since the last call."""
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    def has_prompt(self, ticket_id: str) -> None:
        """A request with the ticket's transfer id is there: the ticket may wait as long as that request."""
        self._server.call(partial(self._note_prompt, ticket_id))

    def lost_prompt(self, ticket_id: str) -> None:
        """No request with the ticket's transfer id is there any more: the ticket waits for another one from now on."""
        self._server.call(partial(self._note_no_prompt, ticket_id))

    def served(self, ticket_id: str) -> None:
        """The ranks serve the ticket."""
        self._server.call(partial(self._note_served, ticket_id))

    def refused(self, ticket_id: str, reason: str) -> None:
        """The ticket is not served."""
        self._server.call(partial(self._note_refused, ticket_id, reason))

    def ended(self, ticket_id: str) -> None:
        """The ranks have ended with a ticket that was served."""
        self._server.call(partial(self._served.discard, ticket_id))

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
        if isinstance(message, OfferTicket):
            return self._offered(message)
        if isinstance(message, AskTicket):
            return self._known(message.ticket_id) or TicketRefused("the ticket is not known here", retry=True)
        return Acknowledged() if self._put(message) else Problem("too many messages wait")

    def _known(self, ticket_id: str) -> TicketTaken | TicketRefused | None:
        """Returns the answer for a ticket that was offered before."""
        if ticket_id in self._waiting or ticket_id in self._served:
            return TicketTaken()
        reason = self._refused.get(ticket_id)
        return None if reason is None else TicketRefused(reason, retry=False)

    def _offered(self, offer: OfferTicket) -> TicketTaken | TicketRefused:
        ticket = offer.ticket
        if (answer := self._known(ticket.ticket_id)) is not None:
            return answer
        if len(ticket.ticket_id) != 32:
            return TicketRefused("ticket_id is not 32 hexadecimal digits", retry=False)
        try:
            self._check(ticket)
        except TicketError as error:
            return TicketRefused(str(error), retry=False)
        blocks = sum(map(len, ticket.remote_block_ids))
        waiting = sum(each.blocks for each in self._waiting.values())
        if len(self._waiting) >= _MAX_WAITING or waiting + blocks > _MAX_WAITING_BLOCKS:
            return TicketRefused("too many tickets wait for their prompts", retry=True)
        if not self._put(offer):
            return TicketRefused("too many messages wait", retry=True)
        self._waiting[ticket.ticket_id] = _Waiting(blocks, time.monotonic())
        return TicketTaken()

    def _put(self, message: OfferTicket | ReleasePrompt) -> bool:
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            return False
        for address in self._ranks:
            self._wakeup.wake(address)
        return True

    def _tick(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        latest = now - EARLY_S - _GRACE_S
        for ticket_id in [i for i, each in self._waiting.items() if not each.has_prompt and each.came_at < latest]:
            self._note_refused(ticket_id, NO_PROMPT)

    def _note_prompt(self, ticket_id: str) -> None:
        if (waiting := self._waiting.get(ticket_id)) is not None:
            waiting.has_prompt = True

    def _note_no_prompt(self, ticket_id: str) -> None:
        if (waiting := self._waiting.get(ticket_id)) is not None:
            waiting.has_prompt, waiting.came_at = False, time.monotonic()

    def _note_served(self, ticket_id: str) -> None:
        self._waiting.pop(ticket_id, None)
        self._served.add(ticket_id)

    def _note_refused(self, ticket_id: str, reason: str) -> None:
        self._waiting.pop(ticket_id, None)
        self._refused[ticket_id] = reason
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
