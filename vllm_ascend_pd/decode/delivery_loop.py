# SPDX-License-Identifier: Apache-2.0
"""The thread that talks to prefill engines which hold prompts (`pd-tickets`): one task per ticket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.prompt_digest import NamesPrompt
from vllm_ascend_pd.core.protocol import Message
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.decode.bootstrap import PrefillAddresses
from vllm_ascend_pd.decode.routed_prompt import RoutedPrompt
from vllm_ascend_pd.decode.ticket_delivery import Delivery, DeliveryError
from vllm_ascend_pd.transport.event_loop_thread import EventLoopThread
from vllm_ascend_pd.transport.keys import Keys
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError

logger = logging.getLogger(__name__)

# Connections without a message under way. The one that was used longest ago is closed first.
_MAX_IDLE = 256


@dataclass(frozen=True)
class DeliverySettings:
    """How to reach prefill engines that hold prompts. Times in seconds."""

    # Those that may be connected to.
    hosts: HostList
    # For one answer.
    answer_timeout_s: float = 5.0
    # How long a prefill engine may say that it cannot take a ticket yet.
    retry_s: float = 20.0
    # From the offer until the outcome, in any case.
    longest_s: float = 3900.0
    # Tickets without an outcome, and prompts whose release was not acknowledged. Further ones fail or are dropped.
    max_pending: int = 4096
    # The cluster's keys of the side channel.
    keys: Keys | None = None


class DeliveryLoop:
    """Any thread may call the public methods. None of them waits for the network, except `close`.

    The private methods run on the loop's own thread, which owns the fields.
    """

    def __init__(
        self,
        settings: DeliverySettings,
        ended: Callable[[str, str], None],
        released: Callable[[], None],
        retried: Callable[[], None],
    ) -> None:
        """Starts the thread, which calls these:

        `ended`: `ended(ticket_id, reason)`, once per ticket. The reason is "" unless the delivery failed.
        `released`: once per `release`.
        `retried`: a ticket is offered again.
        """
        self._settings = settings
        self._ended, self._released, self._retried = ended, released, retried
        self._deliveries: dict[str, asyncio.Task[None]] = {}  # by ticket id
        self._asking: Counter[str] = Counter()  # endpoint -> messages without an answer
        self._idle: OrderedDict[str, None] = OrderedDict()  # endpoints without such messages, the latest last
        self._addresses = PrefillAddresses(settings.hosts, settings.answer_timeout_s)
        self._channel = SideChannelClient(name="pd-tickets-channel", keys=settings.keys)
        self._thread = EventLoopThread("pd-tickets", self._close)

    def deliver(self, ticket: Ticket, prompt: RoutedPrompt) -> None:
        """Hands `ticket` to the engine that holds `prompt`. `ended` is called with how that went."""
        self._thread.call(self._begin, ticket, prompt)

    def end(self, ticket_id: str) -> None:
        """Nothing more is to be said about the ticket. Does nothing if its delivery has ended."""
        self._thread.call(self._cancel, ticket_id)

    def release(self, prompt: RoutedPrompt, named: NamesPrompt, reason: str) -> None:
        """Tells the engine that holds `prompt` that no ticket will come."""
        self._thread.call(self._thread.start, self._release, prompt, named, reason)

    def close(self, timeout_s: float) -> bool:
        """Cancels all work, closes all connections and ends the thread. Returns False if that takes longer."""
        return self._thread.close(timeout_s)

    async def _close(self) -> None:
        self._channel.close()

    def _begin(self, ticket: Ticket, prompt: RoutedPrompt) -> None:
        self._deliveries[ticket.ticket_id] = self._thread.start(self._deliver, ticket, prompt)

    def _cancel(self, ticket_id: str) -> None:
        task = self._deliveries.pop(ticket_id, None)
        if task is not None:
            task.cancel()

    async def _deliver(self, ticket: Ticket, prompt: RoutedPrompt) -> None:
        reason = ""
        try:
            async with asyncio.timeout(self._settings.longest_s):
                await self._of(prompt).deliver(ticket, self._retried)
        except DeliveryError as error:
            reason = str(error)
        except TimeoutError:
            reason = (
                f"no KV came within {self._settings.longest_s:g} s, though the {prompt} had the ticket "
                "(queue_timeout_s, transfer_timeout_s)"
            )
        except Exception as error:
            logger.exception("a ticket cannot be handed to the %s", prompt)
            reason = f"the ticket cannot be handed to the {prompt}: {type(error).__name__}"
        self._deliveries.pop(ticket.ticket_id, None)
        self._ended(ticket.ticket_id, reason)

    async def _release(self, prompt: RoutedPrompt, named: NamesPrompt, reason: str) -> None:
        try:
            await self._of(prompt).release(named, reason)
        finally:
            self._released()

    def _of(self, prompt: RoutedPrompt) -> Delivery:
        return Delivery(prompt, self._addresses, self._ask, self._settings.retry_s)

    async def _ask(self, endpoint: str, message: Message) -> Message | SideChannelError:
        answered: asyncio.Future[Message | SideChannelError] = self._thread.loop.create_future()

        def take(answer: Message | SideChannelError) -> None:
            if not answered.done():  # its task may have been cancelled
                answered.set_result(answer)

        def done(answer: Message | SideChannelError) -> None:  # on the side channel's thread
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._thread.loop.call_soon_threadsafe(take, answer)

        self._asking[endpoint] += 1
        self._idle.pop(endpoint, None)
        answer: Message | SideChannelError = SideChannelError("nothing was sent")
        try:
            self._channel.request(endpoint, message, self._settings.answer_timeout_s, done)
            answer = await answered
            return answer
        finally:
            self._asked(endpoint, keep=not isinstance(answer, SideChannelError))

    def _asked(self, endpoint: str, keep: bool) -> None:
        """A message to `endpoint` was answered, or is given up. `keep`: whether the connection works."""
        self._asking[endpoint] -= 1
        if self._asking[endpoint]:
            return
        del self._asking[endpoint]
        if not keep:
            self._channel.forget(endpoint)
            return
        self._channel.rest(endpoint)
        self._idle[endpoint] = None
        if len(self._idle) > _MAX_IDLE:
            self._channel.forget(self._idle.popitem(last=False)[0])
