# SPDX-License-Identifier: Apache-2.0
"""Decode's tickets: how they are made, and who gets them."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

from vllm_ascend_pd.core.caches import CacheGroup, left_to_decode
from vllm_ascend_pd.core.checksum import Form, column_tokens, is_selected
from vllm_ascend_pd.core.engine_view import EngineRequests, ScheduledRequest
from vllm_ascend_pd.core.plan import NULL_BLOCK
from vllm_ascend_pd.core.prompt_digest import NamesPrompt, PromptDigest
from vllm_ascend_pd.core.protocol import TransferFailure
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.signed_addresses import signature_in
from vllm_ascend_pd.core.signing import signed
from vllm_ascend_pd.core.step import Expect, VerifiedBlocks
from vllm_ascend_pd.core.ticket import Intent, Ticket
from vllm_ascend_pd.core.ticket_params import METASERVER_SIGNATURE, names_prefill
from vllm_ascend_pd.decode.bootstrap import PromptHolder
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.prefill_client import PrefillClient
from vllm_ascend_pd.decode.ticket_client import NoRecipientError, PostOutcome


@dataclass(frozen=True)
class EngineInfo:
    """What tickets say about this decode engine."""

    # The id of this start of the engine.
    engine_id: str
    # Where prefill ranks ask for the engine's description.
    host: str
    port: int
    # Sizes of tensor parallelism and decode context parallelism.
    tp: int
    dcp: int = 1
    # How many tokens in a row a rank of decode context parallelism has.
    interleave: int = 1
    # What drafts here, as `draft_summary` has it. "": nothing with caches of its own.
    draft: str = ""


@dataclass(frozen=True)
class PromptName:
    """Names the prompt of a request that gets no ticket, as its ticket would. Implements `NamesPrompt`."""

    ticket_id: str
    num_tokens: int
    prompt: PromptDigest


class TicketIssuer:
    """Makes a ticket for each request. Keeps no state but the engine's name.

    engine: what tickets say about this engine.
    groups: the engine's cache groups.
    requests: answers questions about requests.
    secret: signs tickets, which are valid for `lifetime_s`. None: they need no signature.
    verified_share: the share of tickets whose KV is compared with prefill's checksums.
    """

    def __init__(
        self,
        engine: EngineInfo,
        groups: Sequence[CacheGroup],
        requests: EngineRequests,
        secret: Secret | None = None,
        lifetime_s: float = 0.0,
        verified_share: float = 0.0,
    ) -> None:
        self._verified_share = verified_share
        self.groups = list(groups)
        self._engine = engine
        self._requests = requests
        self._secret = secret
        self._lifetime_s = lifetime_s
        self._left_to_decode = left_to_decode(groups)

    def renamed(self, engine_id: str) -> None:
        """Later tickets name this engine `engine_id`."""
        self._engine = replace(self._engine, engine_id=engine_id)

    def num_tokens(self, request: ScheduledRequest) -> int:
        """How many of the request's tokens a ticket covers. What was generated already counts as part of the prompt."""
        return request.num_tokens - self._left_to_decode

    def intend(self, request: ScheduledRequest) -> Intent:
        """Makes an intent for the request. Its ticket follows."""
        num_tokens, ticket_id = self.num_tokens(request), secrets.token_hex(16)
        return Intent(
            request_id=self._requests.external_id(request),
            remote_engine_id=self._engine.engine_id,
            ticket_id=ticket_id,
            num_tokens=num_tokens,
            prompt=self._requests.digest(request, num_tokens, ticket_id),
            transfer_id=secrets.token_hex(16),
        )

    def issue(
        self,
        request: ScheduledRequest,
        blocks: tuple[list[int], ...],
        num_external_tokens: int,
        replaces: str = "",
        intent: Intent | None = None,
    ) -> Ticket:
        """Makes a ticket for the request.

        `blocks`: the request's block ids, per cache group. `num_external_tokens`: how many tokens prefill delivers.
        `replaces`: the id of the request's ticket before this one; "": there was none. `intent`: the request's.
        """
        num_tokens = self.num_tokens(request)
        ticket_id = secrets.token_hex(16) if intent is None else intent.ticket_id
        ticket = Ticket(
            request_id=self._requests.external_id(request),
            remote_block_ids=[
                group.holding(ids, 0, num_tokens, last=True) for group, ids in zip(self.groups, blocks, strict=True)
            ],
            remote_block_size=[group.ticket_block_size for group in self.groups],
            remote_engine_id=self._engine.engine_id,
            remote_host=self._engine.host,
            remote_port=self._engine.port,
            remote_tp_size=self._engine.tp,
            remote_dcp_size=self._engine.dcp,
            remote_interleave_size=self._engine.interleave,
            remote_cached_tokens=num_tokens - num_external_tokens,
            ticket_id=ticket_id,
            num_tokens=num_tokens,
            remote_draft=self._engine.draft,
            checksum_form=max(Form).value,
            prompt=self._requests.digest(request, num_tokens, ticket_id),
            replaces=replaces,
        )
        if self._secret is None:
            return ticket
        return signed(ticket, self._secret, math.ceil(time.time() + self._lifetime_s))

    def name(self, request: ScheduledRequest) -> PromptName:
        """Names the request's prompt as its ticket would."""
        ticket_id, num_tokens = secrets.token_hex(16), self.num_tokens(request)
        return PromptName(ticket_id, num_tokens, self._requests.digest(request, num_tokens, ticket_id))

    def verifies(self, ticket: Ticket) -> bool:
        """Whether the ticket's KV is compared with prefill's checksums."""
        return is_selected(self._verified_share, ticket.ticket_id)

    def expect(self, request_id: str, ticket: Ticket, blocks: tuple[list[int], ...]) -> Expect:
        """What this engine's ranks are told of the ticket."""
        cached = ticket.remote_cached_tokens
        # Blocks of all groups. A group of chunked attention has none if a chunk ends with the prompt.
        written = [
            group.holding(ids, cached, ticket.num_tokens, last=True)
            for group, ids in zip(self.groups, blocks, strict=True)
        ]
        lost = [block for ids in written for block in ids if block != NULL_BLOCK]
        verified = None
        if self.verifies(ticket):
            columns = column_tokens(ticket.spans, ticket.num_tokens)
            verified = VerifiedBlocks(tuple(written), ticket.num_tokens, columns)
        return Expect(request_id, ticket.ticket_id, ticket.digest(), lost, cached, verified)


class TicketRecipients:
    """Finds who gets each ticket: a metaserver, which passes it on to prefill, or the engine that holds the prompt. The
    scheduler's thread owns it.

    metaserver: posts tickets to metaservers.
    prefill: hands tickets to prefill engines that hold their prompts.
    """

    def __init__(self, metaserver: MetaserverClient, prefill: PrefillClient) -> None:
        self._metaserver = metaserver
        self._prefill = prefill

    def of(self, params: Mapping[str, Any]) -> TicketRecipient:
        """Returns whom a request's `kv_transfer_params` name. Raises NoRecipientError."""
        if names_prefill(params):
            return _HolderRecipient(self._prefill, self._prefill.parse_holder(params))
        url = params.get("metaserver")
        if not isinstance(url, str):
            raise NoRecipientError("kv_transfer_params has do_remote_prefill but no metaserver URL")
        signature = signature_in(params, METASERVER_SIGNATURE)
        if (refused := self._metaserver.check(url, signature)) is not None:
            raise NoRecipientError(f"the metaserver's URL is refused: {refused}")
        return _MetaserverRecipient(self._metaserver, url, signature)

    def after_intent(
        self, params: Mapping[str, Any], intent_recipient: TicketRecipient, ticket_id: str
    ) -> TicketRecipient:
        """Returns who gets the ticket that follows an intent, and has that engine hold the prompt until it is sent.

        `params`: of prefill's answer to the intent. `intent_recipient`: the intent's. Raises NoRecipientError.
        """
        holder = self._prefill.parse_holder(params)
        self._prefill.keep(ticket_id, holder)
        return _HolderRecipient(self._prefill, holder, intent_recipient)

    def no_ticket(self, params: Mapping[str, Any], named: NamesPrompt, reason: str) -> None:
        """No ticket will be issued for a request whose prompt a prefill engine holds: tells that engine."""
        with suppress(NoRecipientError):  # nobody that this engine may talk to
            self._prefill.release(self._prefill.parse_holder(params), named, reason)

    def poll(self) -> list[PostOutcome]:
        """The outcomes since the last call."""
        return [*self._metaserver.poll(), *self._prefill.poll()]

    def close(self) -> None:
        try:
            self._metaserver.close()
        finally:
            self._prefill.close()


class _MetaserverRecipient:
    """Gets one request's ticket, and is told how its transfer ends. No method waits for the network."""

    def __init__(self, client: MetaserverClient, url: str, signature: str) -> None:
        self._client = client
        self._url = url
        self._signature = signature

    def send(self, ticket: Ticket | Intent, token_ids: Sequence[int]) -> None:
        """Sends the ticket. `TicketRecipients.poll` returns the outcome. `token_ids`: the prompt, if it is wanted."""
        body = {**msgspec.to_builtins(ticket), "token_ids": token_ids}
        self._client.post(ticket.ticket_id, self._url, body, self._signature)

    def end(self, ticket: Ticket | Intent, failure: str | None) -> None:
        """The transfer has ended, before or after the outcome. `failure`: why it failed; None: the KV is there."""
        if failure is not None:
            self._client.cancel(ticket.ticket_id)

    def report_failure(self, failure: TransferFailure) -> None:
        """A rank noticed that the transfer has failed."""
        self._client.report_failure(self._url, failure, self._signature)


class _HolderRecipient:
    """As `_MetaserverRecipient`. The engine that holds the prompt has computed it: no other one is asked."""

    def __init__(
        self, client: PrefillClient, holder: PromptHolder, intent_recipient: TicketRecipient | None = None
    ) -> None:
        """`intent_recipient`: who got the ticket's intent. None: there was none, and a router asked prefill."""
        self._client = client
        self._holder = holder
        self._intent_recipient = intent_recipient

    def send(self, ticket: Ticket | Intent, token_ids: Sequence[int]) -> None:
        assert isinstance(ticket, Ticket)
        self._client.cancel(ticket.ticket_id)  # what `keep` began
        self._client.offer(ticket, self._holder)

    def end(self, ticket: Ticket | Intent, failure: str | None) -> None:
        self._client.cancel(ticket.ticket_id)
        if failure is not None:
            self._client.release(self._holder, ticket, failure)

    def report_failure(self, failure: TransferFailure) -> None:
        """Tells the metaserver that got the intent. A router takes no such report: `end` tells the prefill engine."""
        if self._intent_recipient is not None:
            self._intent_recipient.report_failure(failure)


TicketRecipient: TypeAlias = _MetaserverRecipient | _HolderRecipient
