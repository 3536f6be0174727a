# SPDX-License-Identifier: Apache-2.0
"""Prompts that a router asked for before decode had a ticket, and the tickets that decode sends for them.

A prompt and its ticket find each other by a transfer id, whichever comes first. A prompt that is computed keeps its
blocks until its ticket comes, or `hold_timeout_s` has passed. How many prompts are held is bounded by vLLM's blocks.

The scheduler's thread owns all of this.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from vllm_ascend_pd.core.protocol import OfferTicket, ReleasePrompt
from vllm_ascend_pd.core.step import EngineRequests
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import TICKET_HOST, TICKET_PORT, TRANSFER_ID, TicketError
from vllm_ascend_pd.prefill.outgoing_transfer import ComputedPrompt

HOLD_TIMEOUT_S = 480.0
"""How long blocks are kept unless `hold_timeout_s` says otherwise: as long as vLLM's NIXL connector keeps them."""

EARLY_S = 30.0
"""How long a ticket waits for its prompt. Routers that ask both sides at once send both within moments."""

NO_PROMPT = f"no request with the ticket's transfer_id came within {EARLY_S:g} s"
"""Why a ticket is refused that has waited so long."""

SIBLINGS_S = 2.0
"""How long a ticket waits for another prompt of its transfer id if none of those that came takes it.

One request may have several prompts.
"""

_HAS_TICKET = "the prompt has another ticket"

_Value = TypeVar("_Value")

MAX_REMEMBERED = 4096
"""How many transfer ids and tickets are remembered after their end, and how many releases wait for their prompts."""


class TicketInbox(Protocol):
    """Where decode's tickets come in (`prefill/ticket_listener.py`)."""

    host: str
    port: int
    # Wakes the ranks when a ticket comes, as in `PrefillStep`.
    wakeup_address: str

    def take(self) -> list[OfferTicket | ReleasePrompt]:
        """Returns what has come since the last call."""

    def has_prompt(self, ticket_id: str) -> None:
        """A request with the ticket's transfer id is there."""

    def lost_prompt(self, ticket_id: str) -> None:
        """No request with the ticket's transfer id is there any more."""

    def served(self, ticket_id: str) -> None:
        """The ranks serve the ticket."""

    def refused(self, ticket_id: str, reason: str) -> None:
        """The ticket is not served."""

    def ended(self, ticket_id: str) -> None:
        """The ranks have ended with a ticket that was served."""


@dataclass
class HeldPrompt:
    """A prompt without a ticket."""

    prompt: ComputedPrompt
    transfer_id: str
    # When its blocks are freed, on the monotonic clock. None: the request has not ended.
    deadline: float | None = None
    # Why no ticket is taken for it any more. None: one is.
    given_up: str | None = None


@dataclass
class _Offer:
    """A ticket without a prompt."""

    offer: OfferTicket
    came_at: float
    # Why the prompts of its transfer id do not fit. None: there was none.
    misfit: str | None = None
    # Requests whose prompts do not fit.
    tried: set[str] = field(default_factory=set)
    # Whether a request with its transfer id was there when it was looked for.
    has_prompt: bool = False


class HeldPrompts:
    """Brings prompts and tickets together.

    engine_id: of this start of the engine, which answers name.
    hold_timeout_s: how long a computed prompt waits for its ticket.
    requests: compares prompts.
    left_to_decode: how many of a prompt's tokens no ticket is for (`groups.left_to_decode`).
    """

    def __init__(
        self,
        inbox: TicketInbox,
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
        self._by_request: dict[str, HeldPrompt] = {}
        # By transfer id.
        self._prompts: dict[str, list[HeldPrompt]] = {}
        # By ticket id, in the order in which they came. The inbox bounds their number.
        self._offers: dict[str, _Offer] = {}
        # By transfer id. Oldest first.
        self._reasons: dict[str, str] = {}
        # Ids of tickets that have prompts. Oldest first.
        self._taken: dict[str, None] = {}
        # Ids of tickets that were refused -> whether prompts were there that did not fit. Oldest first.
        self._refused: dict[str, bool] = {}
        # Ids of tickets that will not come any more -> why. Oldest first.
        self._released: dict[str, str] = {}
        # By ticket id: releases that are for no open prompt, each with how long one may still come. Oldest first.
        self._unmatched: dict[str, tuple[ReleasePrompt, float]] = {}

    def __len__(self) -> int:
        """How many prompts have no ticket, computed or not."""
        return len(self._by_request)

    @property
    def num_ended(self) -> int:
        """How many requests have ended whose blocks wait for a ticket."""
        return sum(held.deadline is not None for held in self._by_request.values())

    @property
    def wakeup_address(self) -> str:
        """As `TicketInbox` has it."""
        return self._inbox.wakeup_address

    def get(self, request_id: str) -> HeldPrompt | None:
        return self._by_request.get(request_id)

    def transfer_id_of(self, request: str) -> str:
        """Makes a transfer id for what the API server knows as `request`. Prompts of one request share it."""
        return hashlib.blake2b(request.encode(), key=self._key, digest_size=16).hexdigest()

    def reason(self, request_id: str) -> str | None:
        """Why no ticket is taken for the prompt any more. None: one is."""
        return self._by_request[request_id].given_up

    @owned
    def add(self, prompt: ComputedPrompt, transfer_id: str) -> None:
        """A request for a prompt without a ticket has come."""
        self._give_up_unmatched()  # releases that are over are not for this one
        held = HeldPrompt(prompt, transfer_id, given_up=self._released_before(prompt, transfer_id))
        self._by_request[prompt.request.request_id] = held
        self._prompts.setdefault(transfer_id, []).append(held)

    @owned
    def remove(self, request_id: str, reason: str | None = None) -> None:
        """The prompt has a ticket, or its blocks are freed for that `reason`."""
        held = self._by_request.pop(request_id)
        siblings = self._prompts[held.transfer_id]
        siblings.remove(held)
        if not siblings:
            del self._prompts[held.transfer_id]
        if reason is not None:
            _remember(self._reasons, held.transfer_id, reason)

    @owned
    def request_ended(self, request_id: str) -> dict[str, Any]:
        """The request has ended, and vLLM keeps its blocks: the ticket must come in time.

        Returns the `kv_transfer_params` of its response, which the router hands to decode.
        """
        held = self._by_request[request_id]
        held.deadline = self._clock() + self._hold_timeout_s
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            TRANSFER_ID: held.transfer_id,
            TICKET_HOST: self._inbox.host,
            TICKET_PORT: self._inbox.port,
        }

    @owned
    def give_up(self, reason: str) -> None:
        """No ticket is taken any more for the prompts that are there and have been computed in part."""
        for held in self._by_request.values():
            if held.prompt.done:
                held.given_up = held.given_up or reason

    @owned
    def ended(self) -> list[tuple[str, str, bool]]:
        """Returns ended requests whose blocks need not be held any more: (request id, reason, whether decode said
        so)."""
        self._give_up_unmatched()
        now = self._clock()
        late = f"no ticket came within {self._hold_timeout_s:g} s after prefill had computed the prompt"
        return [
            (request_id, held.given_up or late, held.given_up is not None)
            for request_id, held in self._by_request.items()
            if held.deadline is not None and (held.given_up is not None or now >= held.deadline)
        ]

    @owned
    def matches(self) -> Iterator[tuple[OfferTicket, list[HeldPrompt]]]:
        """Yields tickets, each with the prompts that it may be for. The caller says for each what became of it, by
        `taken`, `refuse`, or `misfits` for all of these prompts."""
        for message in self._inbox.take():
            if isinstance(message, ReleasePrompt):
                self._release(message)
            elif (reason := self._released.get(message.ticket.ticket_id)) is not None:
                self._inbox.refused(message.ticket.ticket_id, reason)
            else:
                self._offers[message.ticket.ticket_id] = _Offer(message, self._clock())
        for ticket_id, offer in list(self._offers.items()):
            prompts = self._prompts.get(offer.offer.transfer_id, [])
            open_ones = self._open(offer.offer.transfer_id)
            if not open_ones:
                self._without_prompt(offer, prompts)
                continue
            if not offer.has_prompt:
                offer.has_prompt = True
                self._inbox.has_prompt(ticket_id)
            candidates = [
                held for held in open_ones if held.prompt.blocks and held.prompt.request.request_id not in offer.tried
            ]
            # A ticket also fits a prompt with one more token, which may have a ticket of its own.
            candidates.sort(key=lambda held: self._num_tokens(held.prompt) != offer.offer.ticket.num_tokens)
            if candidates:
                yield offer.offer, candidates
            if ticket_id in self._offers and offer.misfit is not None:
                waits = any(not held.prompt.blocks for held in open_ones)
                if not waits and self._clock() >= offer.came_at + SIBLINGS_S:
                    self.refuse(ticket_id, offer.misfit)

    @owned
    def taken(self, ticket_id: str, request_id: str) -> None:
        """The ranks get the ticket for this request's prompt."""
        offer = self._offers.pop(ticket_id)
        self.remove(request_id)
        _remember(self._reasons, offer.offer.transfer_id, _HAS_TICKET)
        _remember(self._taken, ticket_id, None)
        self._inbox.served(ticket_id)

    @owned
    def misfits(self, ticket_id: str, held: HeldPrompt, reason: str) -> None:
        """The ticket is not for this prompt. It may be for another that is still to come."""
        offer = self._offers[ticket_id]
        offer.misfit = reason
        offer.tried.add(held.prompt.request.request_id)

    @owned
    def refuse(self, ticket_id: str, reason: str) -> None:
        """The ticket is not served."""
        offer = self._offers.pop(ticket_id)
        _remember(self._refused, ticket_id, offer.misfit is not None)
        self._inbox.refused(ticket_id, reason)

    @owned
    def transfer_ended(self, ticket_id: str) -> None:
        """The ranks have ended with a ticket."""
        self._inbox.ended(ticket_id)

    def _without_prompt(self, offer: _Offer, given_up: list[HeldPrompt]) -> None:
        """No prompt takes this ticket now. One that is still to come may."""
        ticket_id = offer.offer.ticket.ticket_id
        reason = offer.misfit or self._reasons.get(offer.offer.transfer_id)
        if given_up:
            reason = given_up[0].given_up
        if self._clock() >= offer.came_at + (EARLY_S if reason is None else SIBLINGS_S):
            self.refuse(ticket_id, reason or NO_PROMPT)
        elif offer.has_prompt:  # the engine may have no further step: the inbox refuses the ticket then
            offer.has_prompt = False
            self._inbox.lost_prompt(ticket_id)

    def _release(self, message: ReleasePrompt) -> None:
        ticket_id, transfer_id = message.ticket_id, message.transfer_id
        if ticket_id in self._taken or ticket_id in self._released:
            return
        _remember(self._released, ticket_id, message.reason)
        did_not_fit = self._refused.get(ticket_id)
        if ticket_id in self._offers:
            self.refuse(ticket_id, message.reason)
        for held in self._open(transfer_id):
            if self._is_for(message, held.prompt):
                held.given_up = message.reason
                return
        if did_not_fit is None:
            _remember(self._unmatched, ticket_id, (message, self._clock() + EARLY_S))
        elif did_not_fit:  # its prompt is there, with other tokens than decode's
            _remember(self._unmatched, ticket_id, (message, self._clock()))

    def _released_before(self, prompt: ComputedPrompt, transfer_id: str) -> str | None:
        """Why the prompt was released before it came. None: it was not."""
        for ticket_id, (release, until) in self._unmatched.items():
            if release.transfer_id == transfer_id and self._clock() < until and self._is_for(release, prompt):
                del self._unmatched[ticket_id]
                return release.reason
        return None

    def _give_up_unmatched(self) -> None:
        """Gives prompts up that decode has with other tokens, images or adapters, so that no release names them.

        That is so if as many releases of their transfer id have waited in vain as prompts are open.
        """
        if not self._unmatched:
            return
        now = self._clock()
        waited: dict[str, list[ReleasePrompt]] = {}
        for release, until in self._unmatched.values():
            if now >= until:
                waited.setdefault(release.transfer_id, []).append(release)
        have_offers = {each.offer.transfer_id for each in self._offers.values()}
        for transfer_id, releases in waited.items():
            open_ones = self._open(transfer_id)
            if transfer_id in have_offers or len(releases) < len(open_ones):
                continue  # tickets may come for some of them
            for held in open_ones:
                held.given_up = releases[0].reason
            for release in releases:
                del self._unmatched[release.ticket_id]

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

    def _open(self, transfer_id: str) -> list[HeldPrompt]:
        return [held for held in self._prompts.get(transfer_id, []) if held.given_up is None]


def _remember(table: dict[str, _Value], key: str, value: _Value) -> None:
    """Adds to a table of bounded size, whose oldest entry comes first."""
    table.pop(key, None)
    table[key] = value
    if len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]
