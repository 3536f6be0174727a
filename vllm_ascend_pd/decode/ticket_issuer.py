# SPDX-License-Identifier: Apache-2.0
"""Makes decode's tickets: which of a request's blocks prefill may write, and where its ranks find this engine."""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.core.caches import CacheGroup, left_to_decode
from vllm_ascend_pd.core.plan import NULL_BLOCK
from vllm_ascend_pd.core.prompt_digest import PromptDigest
from vllm_ascend_pd.core.step import EngineRequests, Expect, ScheduledRequest
from vllm_ascend_pd.core.ticket import Secret, Ticket, signed


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
    # Tokens in turn that a rank of decode context parallelism has.
    interleave: int = 1
    # What drafts here, as `draft_summary` has it. "": nothing with caches of its own.
    draft: str = ""


@dataclass(frozen=True)
class PromptName:
    """Names the prompt of a request that gets no ticket, as its ticket would. Implements `NamesPrompt`."""

    ticket_id: str
    num_tokens: int
    prompt: PromptDigest


@dataclass(frozen=True)
class Signer:
    """Signs tickets with the cluster's secret. They are valid for `lifetime_s`."""

    secret: Secret
    lifetime_s: float

    def sign(self, ticket: Ticket) -> Ticket:
        return signed(ticket, self.secret, math.ceil(time.time() + self.lifetime_s))


class TicketIssuer:
    """Makes a ticket for each request. Keeps no state.

    engine: what tickets say about this engine.
    groups: the engine's cache groups.
    requests: answers questions about requests.
    signer: None if tickets need no signature.
    """

    def __init__(
        self, engine: EngineInfo, groups: Sequence[CacheGroup], requests: EngineRequests, signer: Signer | None = None
    ) -> None:
        self.groups = list(groups)
        self._engine = engine
        self._requests = requests
        self._signer = signer
        self._left_to_decode = left_to_decode(groups)

    def num_tokens(self, request: ScheduledRequest) -> int:
        """How many of the request's tokens a ticket covers. What was generated already counts as part of the prompt."""
        return request.num_tokens - self._left_to_decode

    def issue(
        self, request: ScheduledRequest, blocks: tuple[list[int], ...], num_external_tokens: int, replaces: str = ""
    ) -> Ticket:
        """Makes a ticket for the request.

        `blocks`: the request's block ids, per cache group. `num_external_tokens`: how many tokens prefill delivers.
        `replaces`: the id of the request's ticket before this one; "": there was none.
        """
        num_tokens = self.num_tokens(request)
        ticket_id = secrets.token_hex(16)
        ticket = Ticket(
            request_id=self._requests.external_id(request),
            remote_block_ids=[g.ticket_blocks(ids, num_tokens) for g, ids in zip(self.groups, blocks, strict=True)],
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
            prompt=self._requests.digest(request, num_tokens, ticket_id),
            replaces=replaces,
        )
        return ticket if self._signer is None else self._signer.sign(ticket)

    def name(self, request: ScheduledRequest) -> PromptName:
        """Names the request's prompt as its ticket would."""
        ticket_id, num_tokens = secrets.token_hex(16), self.num_tokens(request)
        return PromptName(ticket_id, num_tokens, self._requests.digest(request, num_tokens, ticket_id))

    def expect(self, request_id: str, ticket: Ticket, blocks: tuple[list[int], ...]) -> Expect:
        """What this engine's ranks are told of the ticket."""
        cached = ticket.remote_cached_tokens
        # Blocks of all groups. A group of chunked attention has none if a chunk ends with the prompt.
        written = [
            group.holding(ids, cached, ticket.num_tokens, last=True)
            for group, ids in zip(self.groups, blocks, strict=True)
        ]
        lost = [block for ids in written for block in ids if block != NULL_BLOCK]
        return Expect(request_id, ticket.ticket_id, ticket.digest(), lost, cached)
