# SPDX-License-Identifier: Apache-2.0
"""Hands tickets to prefill engines that hold their prompts, without ever blocking the scheduler.

One thread (`pd-tickets`) talks to the engines, with one task for each ticket.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import Observer, PostRetried
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
from vllm_ascend_pd.decode.bootstrap import BootstrapError, PrefillAddresses, PromptHolder, parse_holder
from vllm_ascend_pd.decode.prefill_admission import PrefillAdmission
from vllm_ascend_pd.decode.ticket_client import PostOutcome, TicketClient
from vllm_ascend_pd.transport.peers import Peers
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError

SILENT_ROUNDS = 3
"""A prefill engine that leaves so many messages in a row unanswered counts as gone."""
_ASK_EVERY_S = 2.0
KEEP_EVERY_S = 5.0
"""Between two questions about a ticket that has not been offered, unless prefill's hold is short. Each renews it."""
_LEAST_KEEP_S = 0.1
"""Also if prefill says that its hold is shorter."""
# Between two offers that prefill cannot take yet. It doubles from the first to the last.
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0

# Connections without a message under way. The one that was used longest ago is closed first.
_MAX_IDLE = 256


class DeliveryError(Exception):
    """Prefill does not take a ticket, or does not serve it. The text is the reason."""


class PrefillClient(TicketClient):
    """Hands tickets to prefill engines, on the thread `pd-tickets`."""

    def __init__(
        self,
        peers: Peers,
        config: ConnectorConfig | None = None,
        observer: Observer | None = None,
    ) -> None:
        """
        peers: the prefill engines that may be connected to.
        config: the engine's; None: the defaults.
        """
        self._config = config or ConnectorConfig()
        self._secret = peers.secret
        self._admission = PrefillAdmission(peers)
        self.admitted = self._admission.admitted  # where tickets may be offered, in words
        self._observer = observer or Observer()
        self._addresses = PrefillAddresses(self._admission, self._config.control_timeout_s)
        # The client's thread owns the rest.
        # None until something is sent: most engines never get a request that names a prefill engine.
        self._channel: SideChannelClient | None = None
        self._asking: Counter[str] = Counter()  # endpoint -> messages without an answer
        self._idle: OrderedDict[str, None] = OrderedDict()  # endpoints without such messages, the latest last
        super().__init__("pd-tickets")

    def parse_holder(self, params: Mapping[str, Any]) -> PromptHolder:
        """Reads a request's `kv_transfer_params`. Raises NoRecipientError if no ticket may be sent there."""
        return parse_holder(params, self._admission)

    def offer(self, ticket: Ticket, holder: PromptHolder) -> None:
        """Hands `ticket` to the prompt's holder. `poll` returns the outcome, unless `cancel` comes first."""
        self._begin(ticket.ticket_id, self._deliver, ticket, holder)

    def keep(self, ticket_id: str, holder: PromptHolder) -> None:
        """Has prefill hold the prompt until its ticket is offered. `poll` returns an outcome if it holds it no longer.
        `cancel` ends this: call it before `offer`."""
        self._begin(ticket_id, self._keep, ticket_id, holder)

    def release(self, holder: PromptHolder, named: NamesPrompt, reason: str) -> None:
        """Tells the engine that no ticket will come. `named`: the prompt's ticket, or what stands for one.

        If the message is lost, prefill gives blocks up after a time.
        """
        self._tell(self._release, holder, named, reason)

    async def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()

    async def _deliver(self, ticket: Ticket, holder: PromptHolder) -> PostOutcome:
        """Brings the ticket to its outcome: prefill has ended with it and has not said that it failed. That may be
        before the KV has arrived, or without it: decode's ranks know."""
        longest_s, reason = self._config.queue_timeout_s + self._config.transfer_timeout_s, ""
        try:
            async with asyncio.timeout(longest_s):
                endpoint, started_as = await self._offer(ticket, holder)
                await self._follow(AskTicket(started_as, holder.transfer_id, ticket.ticket_id), endpoint, holder)
        except DeliveryError as error:
            reason = str(error)
        except TimeoutError:
            limits = "queue_timeout_s, transfer_timeout_s"
            reason = f"no KV came within {longest_s:g} s, though the {holder} had the ticket ({limits})"
        return PostOutcome(ticket.ticket_id, ok=not reason, reason=reason)

    async def _keep(self, ticket_id: str, holder: PromptHolder) -> PostOutcome:
        """Asks about a ticket that the engine does not know yet, until it does not hold the prompt any more."""
        try:
            endpoint, started_as = await self._addresses.of(holder)
            question = AskTicket(started_as, holder.transfer_id, ticket_id)
            await self._follow(question, endpoint, holder, is_offered=False)
            raise AssertionError("only an error ends this")
        except (BootstrapError, DeliveryError) as error:
            return PostOutcome(ticket_id, ok=False, reason=str(error))

    async def _release(self, holder: PromptHolder, named: NamesPrompt, reason: str) -> None:
        """Tells prefill that no ticket will come, a few times until it answers."""
        for _ in range(SILENT_ROUNDS):
            try:
                endpoint, started_as = await self._addresses.of(holder)
            except BootstrapError as error:
                if error.final:
                    return
                continue
            which = (named.ticket_id, named.num_tokens, named.prompt)
            answer = await self._ask(endpoint, ReleasePrompt(started_as, holder.transfer_id, reason, *which))
            if isinstance(answer, TicketRefused) and answer.retry:  # too many messages wait there
                await asyncio.sleep(_LAST_PAUSE_S)
            elif not isinstance(answer, SideChannelError):
                return

    async def _offer(self, ticket: Ticket, holder: PromptHolder) -> tuple[str, str]:
        """Offers the ticket until prefill takes it. Returns the endpoint that took it, and the id of the engine's start
        there."""
        began, pause, silent, retry_s = time.monotonic(), _FIRST_PAUSE_S, 0, self._config.grant_timeout_s
        while True:
            try:
                endpoint, started_as = await self._addresses.of(holder)
                answer = await self._ask(endpoint, OfferTicket(started_as, holder.transfer_id, ticket))
                reason = _unusable(answer)
            except BootstrapError as error:
                if error.final:
                    raise DeliveryError(str(error)) from None
                answer, reason = SideChannelError(str(error)), str(error)
            if isinstance(answer, TicketTaken):
                return endpoint, started_as
            if isinstance(answer, SideChannelError):
                self._addresses.forget(holder)
                silent += 1
                if silent == SILENT_ROUNDS:
                    raise DeliveryError(f"the {holder} does not take the ticket: {reason}")
            else:
                silent = 0
                if not (isinstance(answer, TicketRefused) and answer.retry):
                    self._addresses.forget(holder)
                    raise DeliveryError(f"the {holder} refuses the ticket: {reason}")
                if time.monotonic() - began > retry_s:
                    raise DeliveryError(f"the {holder} did not take the ticket in {retry_s:g} s: {reason}")
            self._observer.on(PostRetried())
            await asyncio.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, _LAST_PAUSE_S)

    async def _follow(self, question: AskTicket, endpoint: str, holder: PromptHolder, is_offered: bool = True) -> None:
        """Asks the endpoint at an interval until prefill has ended with the ticket, or does not answer any more.

        `is_offered`: whether the endpoint has taken the ticket. Otherwise it does not know it yet: it holds the prompt.
        Nothing is looked up: the bootstrap server may be down by now.
        """
        silent, every_s = 0, _ASK_EVERY_S if is_offered else _keep_every_s(holder)
        while True:
            await asyncio.sleep(every_s)
            answer = await self._ask(endpoint, question)
            if isinstance(answer, TicketTaken):
                silent = 0
            elif isinstance(answer, SideChannelError):
                silent += 1
                if silent == SILENT_ROUNDS:
                    did = "took the ticket" if is_offered else "held the prompt"
                    raise DeliveryError(f"the {holder} {did} and does not answer any more: {answer}")
            elif isinstance(answer, TicketRefused) and answer.retry:  # it does not know the ticket, or not any more
                if is_offered:
                    return
                silent = 0
            else:
                raise DeliveryError(f"the {holder} does not serve the ticket: {_unusable(answer)}")

    async def _ask(self, endpoint: str, message: Message) -> Message | SideChannelError:
        """Sends a message, and returns the answer."""
        if self._channel is None:
            self._channel = SideChannelClient(name="pd-tickets-channel", secret=self._secret)
        answered: Future[Message | SideChannelError] = Future()
        answered.set_running_or_notify_cancel()  # an answer may come after the task was cancelled
        self._asking[endpoint] += 1
        self._idle.pop(endpoint, None)
        works = False
        try:
            self._channel.request(endpoint, message, self._config.control_timeout_s, answered.set_result)
            answer = await asyncio.wrap_future(answered)
            works = not isinstance(answer, SideChannelError)
            return answer
        finally:
            self._asking[endpoint] -= 1
            if not self._asking[endpoint]:
                del self._asking[endpoint]
                self._keep_or_close(self._channel, endpoint, works)

    def _keep_or_close(self, channel: SideChannelClient, endpoint: str, works: bool) -> None:
        """The last message to `endpoint` was answered, or is given up. `works`: whether the connection does."""
        if not works:
            channel.forget(endpoint)
            return
        channel.rest(endpoint)
        self._idle[endpoint] = None
        if len(self._idle) > _MAX_IDLE:
            channel.forget(self._idle.popitem(last=False)[0])


def _unusable(answer: Message | SideChannelError) -> str:
    """Why `answer` does not help, in words."""
    if isinstance(answer, (TicketRefused, Problem)):
        return answer.reason
    return str(answer) if isinstance(answer, SideChannelError) else f"it answered {type(answer).__name__}"


def _keep_every_s(holder: PromptHolder) -> float:
    """Returns the seconds between two questions, so that one in two may come late."""
    return KEEP_EVERY_S if holder.hold_s is None else min(KEEP_EVERY_S, max(_LEAST_KEEP_S, holder.hold_s / 2))
