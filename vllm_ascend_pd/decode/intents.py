# SPDX-License-Identifier: Apache-2.0
"""Long prompts, which prefill computes before decode gives them blocks (`prefill_first_tokens`).

Decode posts an intent in the place of a ticket. Prefill computes the prompt and holds it, and its answer says where the
ticket goes. Then vLLM gives the request blocks in its own order, and decode offers the ticket straight to prefill, as
behind a router that asks prefill first.

The scheduler's thread owns all of this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_ascend_pd.core.engine_view import EngineRequests, ScheduledRequest
from vllm_ascend_pd.core.protocol import MAX_FAILURE_CHARS, TransferFailure
from vllm_ascend_pd.core.reasons import Decision
from vllm_ascend_pd.core.ticket import Intent
from vllm_ascend_pd.core.ticket_params import (
    TRANSFER_ID,
    names_prefill,
    prefill_first_tokens,
    wants_ticket,
    wants_token_ids,
)
from vllm_ascend_pd.decode.ticket_client import NoRecipientError, PostOutcome
from vllm_ascend_pd.decode.tickets import TicketIssuer, TicketRecipient, TicketRecipients

MAX_POSTED = 256
"""Intents that wait for prefill at a time: each takes a connection to the metaserver. Further ones are posted later."""

_NOT_HELD = (
    "prefill has computed the prompt, and its answer does not say where it is held: prefill_first_tokens needs a proxy "
    "of this version, and hold_timeout_s on prefill engines with a MultiConnector"
)


@dataclass(eq=False)
class LongPrompt:
    """A request whose prompt prefill computes first. It has no blocks.

    It is posted, then due once `ticket_recipient` is known, and leaves `Intents` when it gets blocks or ends.
    """

    request: ScheduledRequest
    # Why prefill computes it.
    decision: Decision
    # What was posted, and to whom. None: it leaves with the next step.
    intent: Intent | None = None
    intent_recipient: TicketRecipient | None = None
    # When it was posted, and when prefill had computed it, in monotonic seconds.
    posted_at: float = 0.0
    computed_at: float = 0.0
    # The prefill engine that holds the prompt. None: prefill has not computed it.
    ticket_recipient: TicketRecipient | None = None
    # Why no ticket will come: prefill has not computed it, or does not hold it any more. None: nothing has failed.
    failure: str | None = None

    def end(self, reason: str) -> None:
        """No ticket will come: prefill need not compute or hold the prompt."""
        recipient = self.ticket_recipient or self.intent_recipient
        if recipient is not None and self.intent is not None:
            recipient.end(self.intent, reason)


class Intents:
    """The long prompts that have no blocks.

    longest: prompts of which prefill computes more tokens are long. None: none is. "auto": as each request says.
    issuer: makes intents.
    requests: answers questions about requests.
    recipients: finds who gets intents, and the tickets that follow.
    due_s: how long a computed prompt may wait for blocks.
    """

    def __init__(
        self,
        longest: int | Literal["auto"] | None,
        issuer: TicketIssuer,
        requests: EngineRequests,
        recipients: TicketRecipients,
        due_s: float,
    ) -> None:
        self._longest = longest
        self._issuer = issuer
        self._requests = requests
        self._recipients = recipients
        self._due_s = due_s
        # By request id. Those that are due are also in `_due`, in the order in which they became due.
        self._prompts: dict[str, LongPrompt] = {}
        self._due: dict[str, LongPrompt] = {}
        self._posted: dict[str, LongPrompt] = {}  # by the intent's id
        self._to_post: list[LongPrompt] = []
        # New requests that vLLM has not asked for, by id. It asks for none while `max_num_seqs` run, and for none
        # behind one that does not fit. Prefill would have nothing to compute meanwhile.
        self._unasked: dict[str, ScheduledRequest] = {}
        self.awaiting_prefill: set[str] = set()
        """Ids of requests that vLLM need not ask for now."""

    def add(self, request: ScheduledRequest) -> None:
        """A new request has come."""
        params = request.kv_transfer_params
        if self._longest_of(request) is not None and wants_ticket(params) and not names_prefill(params):
            self._unasked[request.request_id] = request

    def of(self, request: ScheduledRequest, tokens: int, decision: Decision) -> LongPrompt | None:
        """Returns the request's prompt if prefill computes it first. None: it gets blocks now, as one does whose client
        may add to it. `tokens`: how many of them prefill would compute. `decision`: who computes them, and why."""
        self._unasked.pop(request.request_id, None)
        prompt, longest = self._prompts.get(request.request_id), self._longest_of(request)
        if prompt is None and longest is not None and tokens > longest and not request.resumable:
            prompt = self._prompts[request.request_id] = LongPrompt(request, decision)
            self._to_post.append(prompt)
            self.awaiting_prefill.add(request.request_id)
        return prompt

    def decided(self, request_id: str) -> Decision | None:
        """Returns why prefill computes the request's prompt first. None: it does not, or has failed to."""
        prompt = self._prompts.get(request_id)
        return None if prompt is None or prompt.failure is not None else prompt.decision

    def _longest_of(self, request: ScheduledRequest) -> int | None:
        return prefill_first_tokens(request.kv_transfer_params) if self._longest == "auto" else self._longest

    def unasked(self) -> list[ScheduledRequest]:
        """Returns new requests that vLLM has not asked for."""
        return list(self._unasked.values())

    def take(self, request_id: str) -> LongPrompt | None:
        """Forgets the request: it gets blocks, or has ended. Returns its prompt, if that was long."""
        self._unasked.pop(request_id, None)
        self._due.pop(request_id, None)
        self.awaiting_prefill.discard(request_id)
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None and prompt.intent is not None:
            del self._posted[prompt.intent.ticket_id]
        return prompt

    def post(self) -> Iterator[LongPrompt]:
        """Posts new intents, up to `MAX_POSTED` at a time. Yields those that cannot be posted."""
        waiting = [each for each in self._to_post if self._prompts.get(each.request.request_id) is each]
        room = max(0, MAX_POSTED - (len(self.awaiting_prefill) - len(waiting)))
        to_post, self._to_post = waiting[:room], waiting[room:]
        for prompt in to_post:
            request = prompt.request
            params = request.kv_transfer_params or {}
            try:
                recipient = self._recipients.of(params)
            except NoRecipientError as error:
                self._fail(prompt, str(error))
                yield prompt
                continue
            token_ids = (self._requests.token_ids(request) or []) if wants_token_ids(params) else []
            intent = self._issuer.intend(request)
            prompt.intent, prompt.intent_recipient, prompt.posted_at = intent, recipient, time.monotonic()
            self._posted[intent.ticket_id] = prompt
            recipient.send(intent, token_ids)

    def answered(self, outcome: PostOutcome) -> LongPrompt | None:
        """Takes an outcome. Returns the prompt if it is one of an intent: it is due, or prefill has failed, or does not
        hold it any more."""
        prompt = self._posted.get(outcome.key)
        if prompt is None or prompt.failure is not None:
            return None
        if prompt.ticket_recipient is not None:
            self._lose(prompt, outcome.reason)
            return prompt
        if not outcome.ok:
            self._fail(prompt, outcome.reason)
            return prompt
        try:
            prompt.ticket_recipient = self._ticket_recipient(prompt, outcome)
        except NoRecipientError as error:
            self._fail(prompt, str(error))
            self._report(prompt, prompt.intent_recipient, str(error))
        else:
            prompt.computed_at = time.monotonic()
            self._due[prompt.request.request_id] = prompt
            self.awaiting_prefill.discard(prompt.request.request_id)
        return prompt

    def overdue(self) -> Iterator[LongPrompt]:
        """Yields prompts that have waited too long for blocks."""
        now = time.monotonic()
        while self._due and next(iter(self._due.values())).computed_at + self._due_s <= now:
            prompt = next(iter(self._due.values()))
            self._lose(prompt, f"decode had no room for the prompt within {self._due_s:g} s (queue_timeout_s)")
            yield prompt

    def _lose(self, prompt: LongPrompt, reason: str) -> None:
        """It was due, and gets no ticket."""
        del self._due[prompt.request.request_id]
        prompt.failure = reason
        self._report(prompt, prompt.ticket_recipient, reason)

    def _report(self, prompt: LongPrompt, recipient: TicketRecipient | None, reason: str) -> None:
        """Tells the metaserver, for which prefill has succeeded, why the prompt gets no ticket."""
        intent = prompt.intent
        assert recipient is not None
        assert intent is not None
        recipient.report_failure(TransferFailure(intent.request_id, intent.ticket_id, reason[:MAX_FAILURE_CHARS]))

    def _ticket_recipient(self, prompt: LongPrompt, outcome: PostOutcome) -> TicketRecipient:
        """Returns who holds the prompt. Raises NoRecipientError."""
        assert prompt.intent is not None
        assert prompt.intent_recipient is not None
        params: Mapping[str, Any] = outcome.held or {}
        if not names_prefill(params) or params[TRANSFER_ID] != prompt.intent.transfer_id:
            raise NoRecipientError(_NOT_HELD)
        return self._recipients.after_intent(params, prompt.intent_recipient, prompt.intent.ticket_id)

    def _fail(self, prompt: LongPrompt, reason: str) -> None:
        prompt.failure = reason
        self.awaiting_prefill.discard(prompt.request.request_id)
