# SPDX-License-Identifier: Apache-2.0
"""Prompts that a router asked for before decode had a ticket.

A prompt and its ticket find each other by a transfer id, whichever comes first. A prompt that is computed keeps its
blocks until its ticket comes, or `hold_timeout_s` has passed. How many prompts are held is bounded by vLLM's blocks.

The scheduler's thread owns all of this.
"""

import hashlib
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm_ascend_pd.core.protocol import OfferTicket, ReleasePrompt
from vllm_ascend_pd.core.step import EngineRequests
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import TICKET_HOST, TICKET_PORT, TRANSFER_ID, Ticket, TicketError
from vllm_ascend_pd.prefill.outgoing_transfer import ComputedPrompt
from vllm_ascend_pd.prefill.ticket_listener import EARLY_S, NO_PROMPT, Fate, OfferedTicket, TicketListener

HOLD_TIMEOUT_S = 480.0
"""How long blocks are kept unless `hold_timeout_s` says otherwise: as long as vLLM's NIXL connector keeps them."""

SIBLINGS_S = 2.0
"""How long a ticket waits for another prompt of its transfer id if none of those that came takes it.

One request may have several prompts.
"""

MAX_REMEMBERED = 4096
"""How many transfer ids are remembered after their end."""


class HeldPrompts:
    """Brings prompts and tickets together.

    inbox: has decode's tickets.
    engine_id: of this start of the engine, which answers name.
    hold_timeout_s: how long a computed prompt waits for its ticket.
    requests: compares prompts.
    left_to_decode: how many of a prompt's tokens no ticket is for (`groups.left_to_decode`).
    """

    def __init__(
        self,
        inbox: TicketListener,
        engine_id: str,
        hold_timeout_s: float,
        requests: EngineRequests,
        left_to_decode: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._engine_id = engine_id
        self._hold_timeout_s = hold_timeout_s
        self._requests = requests
        self._left_to_decode = left_to_decode
        self._clock = clock
        # Makes transfer ids that nobody can guess.
        self._key = secrets.token_bytes(32)
        # Those that wait for a ticket, by transfer id.
        self._prompts: dict[str, list[ComputedPrompt]] = {}
        # Why the last prompt of a transfer id takes no ticket any more. Oldest first.
        self._reasons: dict[str, str] = {}

    @property
    def num_ended(self) -> int:
        """How many requests have ended whose blocks wait for a ticket."""
        return sum(prompt.hold_until is not None for prompt in self._all())

    @property
    def wakeup_address(self) -> str:
        """Wakes the ranks when a ticket comes, as in `PrefillStep`."""
        return self._inbox.wakeup_address

    def transfer_id_of(self, request: str) -> str:
        """Makes a transfer id for what the API server knows as `request`. Prompts of one request share it."""
        return hashlib.blake2b(request.encode(), key=self._key, digest_size=16).hexdigest()

    @owned
    def add(self, prompt: ComputedPrompt, transfer_id: str) -> None:
        """A request for a prompt without a ticket has come."""
        self._end_releases()  # those that are over are not for this one
        prompt.transfer_id = transfer_id
        self._prompts.setdefault(transfer_id, []).append(prompt)

    @owned
    def remove(self, prompt: ComputedPrompt, reason: str) -> None:
        """The prompt's blocks are freed, or it has a ticket: the `reason` why it takes no other one."""
        transfer_id, prompt.transfer_id = prompt.transfer_id, None
        assert transfer_id is not None
        self._prompts[transfer_id].remove(prompt)
        if not self._prompts[transfer_id]:
            del self._prompts[transfer_id]
        self._reasons.pop(transfer_id, None)
        self._reasons[transfer_id] = reason
        if len(self._reasons) > MAX_REMEMBERED:
            del self._reasons[next(iter(self._reasons))]

    @owned
    def request_ended(self, prompt: ComputedPrompt) -> dict[str, Any]:
        """The request has ended, and vLLM keeps its blocks: the ticket must come in time.

        Returns the `kv_transfer_params` of its response, which the router hands to decode.
        """
        prompt.hold_until = self._clock() + self._hold_timeout_s
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            TRANSFER_ID: prompt.transfer_id,
            TICKET_HOST: self._inbox.host,
            TICKET_PORT: self._inbox.port,
        }

    @owned
    def give_up(self, reason: str) -> None:
        """No ticket is taken any more for the prompts that are there and have been computed in part."""
        for prompt in self._all():
            if prompt.done:
                prompt.given_up = prompt.given_up or reason

    @owned
    def ended(self) -> list[tuple[ComputedPrompt, str]]:
        """Returns prompts of ended requests whose blocks need not be held any more, each with the reason."""
        now = self._clock()
        late = f"no ticket came within {self._hold_timeout_s:g} s after prefill had computed the prompt"
        return [
            (prompt, prompt.given_up or late)
            for prompt in self._all()
            if prompt.hold_until is not None and (prompt.given_up is not None or now >= prompt.hold_until)
        ]

    @owned
    def match(
        self, check: Callable[[ComputedPrompt, Ticket], Ticket], serve: Callable[[ComputedPrompt, Ticket], None]
    ) -> None:
        """Gives waiting tickets to their prompts.

        check: returns the ticket as it is served. Raises TicketError if it is for another prompt, which may still come.
        serve: hands the prompt to the ranks. Raises TicketError if the ticket is not served.
        """
        self._match_releases()
        for waiting in self._inbox.waiting():
            if not isinstance(waiting.message, OfferTicket) or not self._inbox.wait_until(waiting, None):
                continue
            for prompt in self._candidates(waiting.message, waiting.tried):
                try:
                    ticket = check(prompt, waiting.message.ticket)
                except TicketError as error:
                    waiting.misfit = str(error)
                    waiting.tried.add(prompt.request.request_id)
                    continue
                try:
                    serve(prompt, ticket)
                except TicketError as error:
                    self._inbox.settle(waiting, Fate.REFUSED, str(error))
                else:
                    self.remove(prompt, "the prompt has another ticket")
                    self._inbox.settle(waiting, Fate.SERVED)
                break
            else:
                self._wait(waiting, waiting.message.transfer_id)

    def _candidates(self, offer: OfferTicket, tried: set[str]) -> list[ComputedPrompt]:
        """Returns the prompts that a ticket may be for, the likelier ones first."""
        prompts = self._open(offer.transfer_id)
        candidates = [prompt for prompt in prompts if prompt.blocks and prompt.request.request_id not in tried]
        # A ticket also fits a prompt with one more token, which may have a ticket of its own.
        return sorted(candidates, key=lambda prompt: self._num_tokens(prompt) != offer.ticket.num_tokens)

    def _wait(self, waiting: OfferedTicket, transfer_id: str) -> None:
        """Bounds how long a ticket waits for a prompt that is still to come."""
        open_ones = self._open(transfer_id)
        if not all(prompt.blocks for prompt in open_ones):  # one of these may take it
            return
        reason = waiting.misfit or self._reasons.get(transfer_id)
        if not open_ones and transfer_id in self._prompts:
            reason = self._prompts[transfer_id][0].given_up
        wait_s = EARLY_S if reason is None else SIBLINGS_S
        self._inbox.wait_until(waiting, waiting.came_at + wait_s, reason or NO_PROMPT)

    @owned
    def transfer_ended(self, ticket_id: str) -> None:
        """The ranks have ended with a ticket."""
        self._inbox.ended(ticket_id)

    def _match_releases(self) -> None:
        """Gives up the prompts that decode's releases name."""
        self._end_releases()
        for ticket in self._inbox.waiting():
            if isinstance(ticket.message, ReleasePrompt):
                for prompt in self._open(ticket.message.transfer_id):
                    if self._is_for(ticket.message, prompt):
                        prompt.given_up = ticket.message.reason
                        self._inbox.settle(ticket, Fate.RELEASED, ticket.message.reason)
                        break
        self._end_releases()

    def _end_releases(self) -> None:
        """Ends releases that have waited in vain: decode has their prompts with other tokens, images or adapters.

        The prompts of a transfer id are given up if as many of its releases have waited as prompts are open.
        """
        tickets, over, now = set(), defaultdict[str, list[OfferedTicket]](list), self._clock()
        for each in self._inbox.waiting():
            if isinstance(each.message, OfferTicket):
                tickets.add(each.message.transfer_id)
            elif each.message is not None and each.expires_at is not None and now >= each.expires_at:
                over[each.message.transfer_id].append(each)
        for transfer_id, releases in over.items():
            open_ones = self._open(transfer_id)
            if transfer_id not in tickets and len(releases) >= len(open_ones):  # else tickets may come for some
                for prompt in open_ones:
                    prompt.given_up = releases[0].reason
                for each in releases:
                    self._inbox.settle(each, Fate.RELEASED, each.reason)

    def _all(self) -> list[ComputedPrompt]:
        return [prompt for prompts in self._prompts.values() for prompt in prompts]

    def _open(self, transfer_id: str) -> list[ComputedPrompt]:
        return [prompt for prompt in self._prompts.get(transfer_id, []) if prompt.given_up is None]

    def _num_tokens(self, prompt: ComputedPrompt) -> int:
        """How many tokens a ticket for the prompt is for."""
        return prompt.request.num_prompt_tokens + prompt.is_cut - self._left_to_decode

    def _is_for(self, release: ReleasePrompt, prompt: ComputedPrompt) -> bool:
        """Whether this prompt, of those with the same transfer id, is the released one, or equals it."""
        if release.prompt is None or release.num_tokens != self._num_tokens(prompt):
            return False
        try:
            self._requests.check_prompt(prompt.request, release)
        except TicketError:
            return False
        return True
