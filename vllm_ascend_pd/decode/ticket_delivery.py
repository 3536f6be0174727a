# SPDX-License-Identifier: Apache-2.0
"""Hands one ticket to the prefill engine that holds its prompt, and follows what becomes of it there."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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
from vllm_ascend_pd.decode.bootstrap import BootstrapError, PrefillAddresses
from vllm_ascend_pd.decode.routed_prompt import RoutedPrompt
from vllm_ascend_pd.transport.side_channel import SideChannelError

SILENT_ROUNDS = 3
"""A prefill engine that leaves so many messages in a row unanswered counts as gone."""
_ASK_EVERY_S = 2.0
# Between two offers that prefill cannot take yet. It doubles from the first to the last.
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0

Ask = Callable[[str, Message], Awaitable[Message | SideChannelError]]
"""Sends a message to an endpoint over the side channel, and returns the answer. Ends within a fixed time."""


class DeliveryError(Exception):
    """Prefill does not take a ticket, or does not serve it. The text is the reason."""


@dataclass(frozen=True)
class Delivery:
    """The messages about one prompt.

    prompt: the prompt and the engine that holds it.
    addresses: finds that engine.
    ask: sends a message.
    retry_s: how long prefill may say that it cannot take the ticket yet.
    """

    prompt: RoutedPrompt
    addresses: PrefillAddresses
    ask: Ask
    retry_s: float

    async def deliver(self, ticket: Ticket, retried: Callable[[], None]) -> None:
        """Returns when prefill has ended with the ticket and has not said that it failed. That may be before the KV has
        arrived, or without it: decode's ranks know. Raises DeliveryError.

        `retried`: called before each offer but the first.
        """
        endpoint, started_as = await self._offer(ticket, retried)
        await self._follow(ticket, endpoint, started_as)

    async def release(self, named: NamesPrompt, reason: str) -> None:
        """Tells prefill that no ticket will come, a few times until it answers. Prefill also gives its blocks up after
        a time."""
        for _ in range(SILENT_ROUNDS):
            try:
                endpoint, started_as = await self.addresses.of(self.prompt)
            except BootstrapError as error:
                if error.final:
                    return
                continue
            message = ReleasePrompt(
                engine_id=started_as,
                transfer_id=self.prompt.transfer_id,
                ticket_id=named.ticket_id,
                num_tokens=named.num_tokens,
                prompt=named.prompt,
                reason=reason,
            )
            answer = await self.ask(endpoint, message)
            if not isinstance(answer, SideChannelError):
                return

    async def _offer(self, ticket: Ticket, retried: Callable[[], None]) -> tuple[str, str]:
        """Offers the ticket until prefill takes it. Returns the endpoint that took it, and the id of the engine's start
        there."""
        began, pause, silent = time.monotonic(), _FIRST_PAUSE_S, 0
        while True:
            try:
                endpoint, started_as = await self.addresses.of(self.prompt)
                answer = await self.ask(endpoint, OfferTicket(started_as, self.prompt.transfer_id, ticket))
                reason = self._unusable(answer)
            except BootstrapError as error:
                if error.final:
                    raise DeliveryError(str(error)) from None
                answer, reason = SideChannelError(str(error)), str(error)
            if isinstance(answer, TicketTaken):
                return endpoint, started_as
            if isinstance(answer, SideChannelError):
                self.addresses.forget(self.prompt)
                silent += 1
                if silent == SILENT_ROUNDS:
                    raise DeliveryError(f"the {self.prompt} does not take the ticket: {reason}")
            else:
                silent = 0
                if not (isinstance(answer, TicketRefused) and answer.retry):
                    self.addresses.forget(self.prompt)
                    raise DeliveryError(f"the {self.prompt} refuses the ticket: {reason}")
                if time.monotonic() - began > self.retry_s:
                    raise DeliveryError(f"the {self.prompt} did not take the ticket in {self.retry_s:g} s: {reason}")
            retried()
            await asyncio.sleep(random.uniform(pause / 2, pause))
            pause = min(2 * pause, _LAST_PAUSE_S)

    async def _follow(self, ticket: Ticket, endpoint: str, started_as: str) -> None:
        """Asks the endpoint that took the ticket, at an interval, until prefill has ended with the ticket or does not
        answer any more. Nothing is looked up: the bootstrap server may be down by now."""
        silent = 0
        question = AskTicket(started_as, self.prompt.transfer_id, ticket.ticket_id)
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            answer = await self.ask(endpoint, question)
            if isinstance(answer, TicketTaken):
                silent = 0
            elif isinstance(answer, SideChannelError):
                silent += 1
                if silent == SILENT_ROUNDS:
                    raise DeliveryError(f"the {self.prompt} took the ticket and does not answer any more: {answer}")
            elif isinstance(answer, TicketRefused) and answer.retry:  # it does not know the ticket any more
                return
            else:
                raise DeliveryError(f"the {self.prompt} does not serve the ticket: {self._unusable(answer)}")

    def _unusable(self, answer: Message | SideChannelError) -> str:
        """Why `answer` does not help, in words."""
        if isinstance(answer, (TicketRefused, Problem)):
            return answer.reason
        return str(answer) if isinstance(answer, SideChannelError) else f"it answered {type(answer).__name__}"
