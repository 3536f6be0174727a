# SPDX-License-Identifier: Apache-2.0
"""Hands tickets to prefill engines that hold their prompts, without ever blocking the scheduler.

One thread (`pd-tickets`) talks to the engines, with one task for each ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.observer import DecodeSchedulerObserver
from vllm_ascend_pd.core.prompt_digest import NamesPrompt
from vllm_ascend_pd.core.protocol import (
    AskTicket,
    Message,
    OfferTicket,
    Problem,
    ReleasePrompt,
    TicketRefused,
    TicketTaken,
)
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.decode.bootstrap import BootstrapError, PrefillAddresses, RoutedPrompt, parse_routed_prompt
from vllm_ascend_pd.decode.metaserver import PostOutcome
from vllm_ascend_pd.transport.event_loop_thread import EventLoopThread
from vllm_ascend_pd.transport.keys import Keys
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError

SILENT_ROUNDS = 3
"""A prefill engine that leaves so many messages in a row unanswered counts as gone."""
_ASK_EVERY_S = 2.0
# Between two offers that prefill cannot take yet. It doubles from the first to the last.
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0

# Tickets without an outcome, and prompts whose release was not acknowledged. Further ones fail or are dropped.
_MAX_PENDING = 4096

# Connections without a message under way. The one that was used longest ago is closed first.
_MAX_IDLE = 256

logger = logging.getLogger(__name__)


class DeliveryError(Exception):
    """Prefill does not take a ticket, or does not serve it. The text is the reason."""


class PrefillClient:
    """Any thread may call the public methods. None of them waits for the network, except `close`.

    The thread starts with the first ticket: most engines never get a request that names a prefill engine. The private
    methods run on it.
    """

    def __init__(
        self,
        hosts: HostList,
        config: ConnectorConfig | None = None,
        keys: Keys | None = None,
        observer: DecodeSchedulerObserver | None = None,
    ) -> None:
        """
        hosts: those that may be connected to.
        config: the engine's; None: the defaults.
        keys: the cluster's keys of the side channel.
        """
        config = config or ConnectorConfig()
        self._hosts = hosts
        # For one answer.
        self._answer_timeout_s = config.control_timeout_s
        # How long a prefill engine may say that it cannot take a ticket yet.
        self._retry_s = config.grant_timeout_s
        # From the offer until the outcome, in any case.
        self._longest_s = config.queue_timeout_s + config.transfer_timeout_s
        self._keys = keys
        self._observer = observer or DecodeSchedulerObserver()
        self._outcomes: deque[PostOutcome] = deque()  # its own operations are atomic
        self._lock = threading.Lock()
        self._open: set[str] = set()  # ids of tickets without an outcome; under the lock
        self._releases = 0  # prompts whose release was not acknowledged; under the lock
        self._closed = False  # under the lock
        self._channel: _Channel | None = None  # under the lock
        self._addresses = PrefillAddresses(hosts, self._answer_timeout_s)
        self._deliveries: dict[str, asyncio.Task[None]] = {}  # by ticket id

    def parse(self, params: Mapping[str, Any]) -> RoutedPrompt:
        """Reads a request's `kv_transfer_params`. Raises RouteError if no ticket may be sent there."""
        return parse_routed_prompt(params, self._hosts)

    def offer(self, ticket: Ticket, prompt: RoutedPrompt) -> None:
        """Hands `ticket` to the engine that holds `prompt`. `poll` returns the outcome, unless `end` comes first."""
        with self._lock:
            if self._closed:
                return
            if len(self._open) >= _MAX_PENDING:
                reason = f"{len(self._open)} tickets wait already: prefill does not keep up"
                self._outcomes.append(PostOutcome(ticket.ticket_id, ok=False, reason=reason))
                return
            self._open.add(ticket.ticket_id)
            channel = self._started()
            channel.thread.call(self._begin, channel, ticket, prompt)

    def end(self, ticket_id: str) -> None:
        """The ticket's outcome is not wanted any more. If it is there already, `poll` still returns it."""
        with self._lock:
            if ticket_id in self._open and self._channel is not None:
                self._channel.thread.call(self._cancel, ticket_id)
            self._open.discard(ticket_id)

    def release(self, prompt: RoutedPrompt, named: NamesPrompt, reason: str) -> None:
        """Tells the engine that holds `prompt` that no ticket will come. `named`: its ticket, or what stands for one.

        Beyond `_MAX_PENDING` such messages at a time a further one is dropped. Prefill gives blocks up after a time.
        """
        with self._lock:
            if self._closed or self._releases >= _MAX_PENDING:
                return
            self._releases += 1
            channel = self._started()
            channel.thread.call(channel.thread.start, self._release, channel, prompt, named, reason)

    def poll(self) -> list[PostOutcome]:
        """The outcomes since the last call."""
        outcomes = []
        while self._outcomes:
            outcomes.append(self._outcomes.popleft())
        return outcomes

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all deliveries without outcomes, and the thread. A second call does no harm."""
        with self._lock:
            self._closed = True
            self._open.clear()
            channel, self._channel = self._channel, None
        if channel is not None and not channel.thread.close(timeout_s):
            logger.warning("the thread that hands tickets to prefill did not end within %g s", timeout_s)

    def _started(self) -> _Channel:
        if self._channel is None:
            self._channel = _Channel(self._answer_timeout_s, self._keys)
        return self._channel

    def _begin(self, channel: _Channel, ticket: Ticket, prompt: RoutedPrompt) -> None:
        self._deliveries[ticket.ticket_id] = channel.thread.start(self._deliver, channel, ticket, prompt)

    def _cancel(self, ticket_id: str) -> None:
        task = self._deliveries.pop(ticket_id, None)
        if task is not None:
            task.cancel()

    async def _deliver(self, channel: _Channel, ticket: Ticket, prompt: RoutedPrompt) -> None:
        """Brings the ticket to its outcome: prefill has ended with it and has not said that it failed. That may be
        before the KV has arrived, or without it: decode's ranks know."""
        longest_s, reason = self._longest_s, ""
        try:
            async with asyncio.timeout(longest_s):
                endpoint, started_as = await self._offer(channel, ticket, prompt)
                await self._follow(
                    channel, AskTicket(started_as, prompt.transfer_id, ticket.ticket_id), endpoint, prompt
                )
        except DeliveryError as error:
            reason = str(error)
        except TimeoutError:
            limits = "queue_timeout_s, transfer_timeout_s"
            reason = f"no KV came within {longest_s:g} s, though the {prompt} had the ticket ({limits})"
        except Exception as error:
            logger.exception("a ticket cannot be handed to the %s", prompt)
            reason = f"the ticket cannot be handed to the {prompt}: {type(error).__name__}"
        self._deliveries.pop(ticket.ticket_id, None)
        with self._lock:
            if ticket.ticket_id in self._open:
                self._open.discard(ticket.ticket_id)
                self._outcomes.append(PostOutcome(ticket.ticket_id, ok=not reason, reason=reason))

    async def _release(self, channel: _Channel, prompt: RoutedPrompt, named: NamesPrompt, reason: str) -> None:
        """Tells prefill that no ticket will come, a few times until it answers."""
        try:
            for _ in range(SILENT_ROUNDS):
                try:
                    endpoint, started_as = await self._addresses.of(prompt)
                except BootstrapError as error:
                    if error.final:
                        return
                    continue
                which = (named.ticket_id, named.num_tokens, named.prompt)
                answer = await channel.ask(endpoint, ReleasePrompt(started_as, prompt.transfer_id, reason, *which))
                if not isinstance(answer, SideChannelError):
                    return
        finally:
            with self._lock:
                self._releases -= 1

    async def _offer(self, channel: _Channel, ticket: Ticket, prompt: RoutedPrompt) -> tuple[str, str]:
        """Offers the ticket until prefill takes it. Returns the endpoint that took it, and the id of the engine's start
        there."""
        began, pause, silent, retry_s = time.monotonic(), _FIRST_PAUSE_S, 0, self._retry_s
        while True:
            try:
                endpoint, started_as = await self._addresses.of(prompt)
                answer = await channel.ask(endpoint, OfferTicket(started_as, prompt.transfer_id, ticket))
                reason = _unusable(answer)
            except BootstrapError as error:
                if error.final:
                    raise DeliveryError(str(error)) from None
                answer, reason = SideChannelError(str(error)), str(error)
            if isinstance(answer, TicketTaken):
                return endpoint, started_as
            if isinstance(answer, SideChannelError):
                self._addresses.forget(prompt)
                silent += 1
                if silent == SILENT_ROUNDS:
                    raise DeliveryError(f"the {prompt} does not take the ticket: {reason}")
            else:
                silent = 0
                if not (isinstance(answer, TicketRefused) and answer.retry):
                    self._addresses.forget(prompt)
                    raise DeliveryError(f"the {prompt} refuses the ticket: {reason}")
                if time.monotonic() - began > retry_s:
                    raise DeliveryError(f"the {prompt} did not take the ticket in {retry_s:g} s: {reason}")
            self._observer.post_retried()
            await asyncio.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, _LAST_PAUSE_S)

    async def _follow(self, channel: _Channel, question: AskTicket, endpoint: str, prompt: RoutedPrompt) -> None:
        """Asks the endpoint that took the ticket, at an interval, until prefill has ended with the ticket or does not
        answer any more. Nothing is looked up: the bootstrap server may be down by now."""
        silent = 0
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            answer = await channel.ask(endpoint, question)
            if isinstance(answer, TicketTaken):
                silent = 0
            elif isinstance(answer, SideChannelError):
                silent += 1
                if silent == SILENT_ROUNDS:
                    raise DeliveryError(f"the {prompt} took the ticket and does not answer any more: {answer}")
            elif isinstance(answer, TicketRefused) and answer.retry:  # it does not know the ticket any more
                return
            else:
                raise DeliveryError(f"the {prompt} does not serve the ticket: {_unusable(answer)}")


def _unusable(answer: Message | SideChannelError) -> str:
    """Why `answer` does not help, in words."""
    if isinstance(answer, (TicketRefused, Problem)):
        return answer.reason
    return str(answer) if isinstance(answer, SideChannelError) else f"it answered {type(answer).__name__}"


class _Channel:
    """The thread that talks to prefill engines (`pd-tickets`), and its connections. The thread owns the fields."""

    def __init__(self, answer_timeout_s: float, keys: Keys | None) -> None:
        """Starts the thread."""
        self._timeout_s = answer_timeout_s
        self._asking: Counter[str] = Counter()  # endpoint -> messages without an answer
        self._idle: OrderedDict[str, None] = OrderedDict()  # endpoints without such messages, the latest last
        self._channel = SideChannelClient(name="pd-tickets-channel", keys=keys)
        self.thread = EventLoopThread("pd-tickets", self._close)

    async def _close(self) -> None:
        self._channel.close()

    async def ask(self, endpoint: str, message: Message) -> Message | SideChannelError:
        """Sends a message, and returns the answer."""
        answered: asyncio.Future[Message | SideChannelError] = self.thread.loop.create_future()

        def take(answer: Message | SideChannelError) -> None:
            if not answered.done():  # its task may have been cancelled
                answered.set_result(answer)

        def done(answer: Message | SideChannelError) -> None:  # on the side channel's thread
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self.thread.loop.call_soon_threadsafe(take, answer)

        self._asking[endpoint] += 1
        self._idle.pop(endpoint, None)
        answer: Message | SideChannelError = SideChannelError("nothing was sent")
        try:
            self._channel.request(endpoint, message, self._timeout_s, done)
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
