# SPDX-License-Identifier: Apache-2.0
"""Prompts that prefill computes before their tickets come: a router asks prefill first, or decode has posted an intent.

A prompt and its ticket find each other by a transfer id, whichever comes first. A prompt that is computed keeps its
blocks until its ticket comes, or decode has not asked about the ticket for `hold_timeout_s`. `HoldingRoom` bounds how
many prompts are held.

The scheduler's thread owns all of this.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm_ascend_pd.core.bounds import MAX_TICKET_LIFETIME_S
from vllm_ascend_pd.core.caches import BlockNeeds
from vllm_ascend_pd.core.engine_view import EngineBlocks, EngineRequests, ScheduledRequest
from vllm_ascend_pd.core.protocol import OfferTicket, ReleasePrompt
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signed_addresses import sign_listener
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket, TicketError
from vllm_ascend_pd.core.ticket_params import (
    HOLD_S,
    TICKET_HOST,
    TICKET_LISTENER_SIGNATURE,
    TICKET_PORT,
    TRANSFER_ID,
)
from vllm_ascend_pd.prefill.holding_room import HoldingRoom
from vllm_ascend_pd.prefill.outgoing_transfer import OutgoingPrompt
from vllm_ascend_pd.prefill.ticket_listener import EARLY_S, Fate, OfferedTicket, TicketListener

logger = logging.getLogger(__name__)

HOLD_TIMEOUT_S = 480.0
"""How long blocks are kept unless `hold_timeout_s` says otherwise: as long as vLLM's NIXL connector keeps them."""
INTENT_HOLD_S = 60.0
"""The longest hold of an intent's prompt. Decode asks about its ticket every 5 s from prefill's answer on, while a
router may take its time. Where the client leaves just as prefill answers, nobody asks."""

_NO_ROOM = (
    "prefill has too few blocks to hold this prompt: a prompt with a ticket needs them. Lower --max-model-len on "
    "prefill, or give its KV cache more memory"
)


class HeldPrompts:
    """Brings prompts and tickets together.

    listener: has decode's tickets.
    engine_id: of this start of the engine, which answers name.
    hold_timeout_s: how long a computed prompt waits for its ticket, or for decode to ask about that.
    requests: compares prompts.
    blocks: says which requests are ready.
    needs: how many blocks prompts take.
    left_to_decode: how many of a prompt's tokens no ticket is for (`core/caches.py`).
    secret: signs the listener's address, which routers hand to decode. None: it is not signed.
    """

    def __init__(
        self,
        listener: TicketListener,
        engine_id: str,
        hold_timeout_s: float,
        requests: EngineRequests,
        blocks: EngineBlocks,
        needs: BlockNeeds,
        left_to_decode: int,
        secret: Secret | None = None,
    ) -> None:
        self.listener = listener
        self._engine_id = engine_id
        self._hold_timeout_s = hold_timeout_s
        self._requests = requests
        self._blocks = blocks
        self._needs = needs
        self._left_to_decode = left_to_decode
        self._secret = secret
        self._clock = time.monotonic
        # Makes transfer ids that nobody can guess.
        self._key = secrets.token_bytes(32)
        # Those that wait for a ticket, by transfer id.
        self._prompts: dict[str, list[OutgoingPrompt]] = {}
        # When prompts may start.
        self.room = HoldingRoom(needs)

    @property
    def is_idle(self) -> bool:
        """Whether no prompt waits for a ticket and nothing waits for a prompt, so that a step has nothing to do."""
        return not (self._prompts or self.listener.has_waiting)

    @property
    def any_ended(self) -> bool:
        """Whether a request has ended whose blocks wait for a ticket."""
        return any(prompt.hold_until is not None for prompt in self._all())

    def transfer_id_of(self, request: str) -> str:
        """Makes a transfer id for what the API server knows as `request`. Prompts of one request share it."""
        return hashlib.blake2b(request.encode(), key=self._key, digest_size=16).hexdigest()

    @owned
    def add(self, prompt: OutgoingPrompt, transfer_id: str, is_intent: bool = False) -> None:
        """A request for a prompt without a ticket has come. `is_intent`: for decode's intent, not for a router."""
        with self.listener.waiting() as waiting:
            self._take_releases(waiting)  # those that are over are not for this prompt
        prompt.transfer_id = transfer_id
        prompt.hold_s = min(self._hold_timeout_s, INTENT_HOLD_S) if is_intent else self._hold_timeout_s
        self._prompts.setdefault(transfer_id, []).append(prompt)
        self.listener.prompt_came(transfer_id)
        self.room.add(prompt.request.request_id, self._blocks_of(prompt.request))

    @owned
    def free(self, prompt: OutgoingPrompt, reason: str) -> None:
        """The prompt's blocks are freed without a ticket. Tickets for it are refused from now on.

        After a release they are not: a ticket that comes is for another prompt of the same request.
        """
        transfer_id = prompt.transfer_id
        assert transfer_id is not None
        self._remove(prompt)
        if transfer_id not in self._prompts and not prompt.is_released:
            self.listener.refuse(transfer_id, reason)

    @owned
    def refuse(self, transfer_id: str, reason: str) -> None:
        """A request's prompt will not be kept. No prompt of the same request will be, for the same reason."""
        self.listener.refuse(transfer_id, reason)

    def _remove(self, prompt: OutgoingPrompt) -> None:
        transfer_id, prompt.transfer_id = prompt.transfer_id, None
        assert transfer_id is not None
        self._prompts[transfer_id].remove(prompt)
        if not self._prompts[transfer_id]:
            del self._prompts[transfer_id]
        self.room.remove(prompt.request.request_id)

    @owned
    def end_request(self, prompt: OutgoingPrompt) -> dict[str, Any]:
        """The request has ended, and vLLM keeps its blocks: the ticket must come in time.

        Returns the `kv_transfer_params` of its response, which the router hands to decode.
        """
        prompt.hold_until = self._clock() + prompt.hold_s
        prompt.hold_latest = self._clock() + MAX_TICKET_LIFETIME_S
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            TRANSFER_ID: prompt.transfer_id,
            TICKET_HOST: self.listener.host,
            TICKET_PORT: self.listener.port,
            HOLD_S: prompt.hold_s,
        }
        if self._secret is not None:
            where = (self._engine_id, self.listener.host, self.listener.port)
            params[TICKET_LISTENER_SIGNATURE] = sign_listener(self._secret, *where, prompt.transfer_id)
        return params

    @owned
    def give_up(self, reason: str) -> None:
        """No ticket is taken any more for the prompts that are there and have been computed in part."""
        for prompt in self._all():
            if prompt.done:
                self._give_up(prompt, reason)

    @owned
    def make_room(self, without_blocks: Callable[[], Iterable[ScheduledRequest]]) -> None:
        """Ends holds that a prompt with a ticket would wait for: those of prompts that took more than their room.

        A prompt that fits beside them waits at most for other prompts with tickets, which are sent and end.

        without_blocks: returns requests with a ticket that have not started, or were preempted.
        """
        if not (beyond := self.room.beyond):
            return
        held = [prompt for prompt in self._all() if prompt.is_complete and prompt.request.request_id in beyond]
        if held and any(self._blocks_of(request) > self.room.left for request in without_blocks()):
            for prompt in held:
                self._give_up(prompt, _NO_ROOM)

    @owned
    def overdue(self) -> list[tuple[OutgoingPrompt, str]]:
        """Returns prompts of ended requests whose blocks need not be held any more, each with the reason.

        A decode engine that has no room for a prompt yet asks about its ticket: that renews the hold.
        """
        now = self._clock()
        for prompt in self._all():
            if prompt.hold_until is not None and prompt.hold_until <= now and prompt.transfer_id is not None:
                asked_at = self.listener.asked_at(prompt.transfer_id)
                if asked_at is not None:
                    prompt.hold_until = min(asked_at + prompt.hold_s, prompt.hold_latest)
        late = "neither a ticket nor a question about one came for {:g} s"
        return [
            (prompt, prompt.given_up or late.format(prompt.hold_s))
            for prompt in self._all()
            if prompt.hold_until is not None and (prompt.given_up is not None or now >= prompt.hold_until)
        ]

    @owned
    def match(self, serve: Callable[[OutgoingPrompt, Ticket], None]) -> None:
        """Gives waiting tickets to their prompts.

        serve: hands the prompt to the ranks. Raises TicketError if the ticket does not fit it, or is not served.
        """
        with self.listener.waiting() as waiting:
            self._take_releases(waiting)
            for offered in waiting:
                if not isinstance(offer := offered.message, OfferTicket):
                    continue
                for prompt in self._candidates(offer, offered.tried):
                    try:
                        serve(prompt, offer.ticket)
                    except TicketError as error:
                        offered.reason = str(error)
                        offered.tried.add(prompt.request.request_id)
                        continue
                    self._remove(prompt)
                    self.listener.settle(offered, Fate.SERVED)
                    break
                else:
                    if not all(self._is_ready(prompt) for prompt in self._open(offer.transfer_id)):
                        offered.expires_at = self._clock() + EARLY_S  # one of these may take it when it is ready

    def _give_up(self, prompt: OutgoingPrompt, reason: str) -> None:
        if prompt.given_up is None:
            prompt.given_up = reason
            logger.warning("request %s: its prompt is freed without a ticket: %s", prompt.request.request_id, reason)

    def _candidates(self, offer: OfferTicket, tried: set[str]) -> list[OutgoingPrompt]:
        """Returns the prompts that a ticket may be for, the likelier ones first."""
        prompts = self._open(offer.transfer_id)
        candidates = [prompt for prompt in prompts if self._is_ready(prompt) and prompt.request.request_id not in tried]
        # A ticket also fits a prompt with one more token, which may have a ticket of its own.
        return sorted(candidates, key=lambda prompt: self._num_tokens(prompt) != offer.ticket.num_tokens)

    def _take_releases(self, waiting: list[OfferedTicket]) -> None:
        """Gives up the prompts that decode's releases name.

        A release that has waited in vain for its prompt means the only prompt of its transfer id: decode has that with
        other tokens, images or adapters.
        """
        for each in waiting:
            if isinstance(release := each.message, ReleasePrompt):
                prompts = self._open(release.transfer_id)
                is_over = self._clock() >= each.expires_at
                named = [prompt for prompt in prompts if self._is_for(release, prompt)]
                if is_over and len(prompts) == 1:
                    named = prompts
                for prompt in named[:1]:
                    prompt.given_up, prompt.is_released = release.reason, True
                if named or is_over:
                    self.listener.settle(each, Fate.OVER)

    def _all(self) -> list[OutgoingPrompt]:
        return [prompt for prompts in self._prompts.values() for prompt in prompts]

    def _open(self, transfer_id: str) -> list[OutgoingPrompt]:
        return [prompt for prompt in self._prompts.get(transfer_id, []) if prompt.given_up is None]

    def _is_ready(self, prompt: OutgoingPrompt) -> bool:
        """Whether a ticket can be compared with the prompt. It may come before the prompt starts, which then does not
        wait for room any more."""
        return self._blocks.is_ready(prompt.request)

    def _blocks_of(self, request: ScheduledRequest) -> int:
        """Returns the most blocks that the request has at a time."""
        return self._needs.of(request.num_prompt_tokens + request.max_tokens)

    def _num_tokens(self, prompt: OutgoingPrompt) -> int:
        """How many tokens a ticket for the prompt is for."""
        return prompt.request.num_prompt_tokens + prompt.is_cut - self._left_to_decode

    def _is_for(self, release: ReleasePrompt, prompt: OutgoingPrompt) -> bool:
        """Whether this prompt, of those with the same transfer id, is the released one, or equals it."""
        if release.num_tokens != self._num_tokens(prompt):
            return False
        try:
            self._requests.check_prompt(prompt.request, release)
        except TicketError:
            return False
        return True
