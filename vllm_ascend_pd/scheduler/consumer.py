# SPDX-License-Identifier: Apache-2.0
"""The decode side of the scheduler: issues a ticket per request, and follows it until its KV has arrived."""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.compat import external_request_id
from vllm_ascend_pd.core.groups import CacheGroup
from vllm_ascend_pd.core.plan import NULL_BLOCK
from vllm_ascend_pd.core.ticket import Ticket, wants_ticket
from vllm_ascend_pd.scheduler.metaserver_client import MetaserverClient
from vllm_ascend_pd.step import ConsumerStep, Expect, WorkerReport

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class _Issued:
    """A ticket we gave out. `open` until every rank has reported that it ended."""

    ticket: Ticket
    open: bool = True
    finished: bool = False
    failure: str | None = None
    received: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Listener:
    """What tickets say about this engine: where prefill ranks find it, its parallel sizes, and what drafts on it."""

    engine_id: str
    host: str
    port: int
    tp: int
    dcp: int = 1
    interleave: int = 1
    draft: str = ""


class ConsumerScheduler:
    def __init__(self, listener: Listener, groups: Sequence[CacheGroup], metaserver: MetaserverClient) -> None:
        self._listener = listener
        self._groups = list(groups)
        # Decode computes the prompt's last token. KV may be written twice; a state must not have seen it yet.
        self._left_to_decode = int(any(group.holds_state for group in groups))
        self._metaserver = metaserver
        self._by_request: dict[str, _Issued] = {}
        self._request_of: dict[str, str] = {}  # ticket id -> request id
        self._step = ConsumerStep()
        self._posts: list[tuple[Ticket, str]] = []

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int:
        """How many of the prompt's tokens prefill will deliver. Has no side effects."""
        if not wants_ticket(request.kv_transfer_params) or request.request_id in self._by_request:
            return 0
        return max(0, int(request.num_prompt_tokens) - self._left_to_decode - num_computed_tokens)

    def allocated(self, request: "Request", blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Issues the request's ticket. A second call, when decode starts, changes nothing."""
        if num_external_tokens == 0 or request.request_id in self._by_request:
            return
        params = request.kv_transfer_params or {}
        num_tokens = request.num_prompt_tokens - self._left_to_decode
        ticket = Ticket(
            request_id=external_request_id(request.request_id),
            remote_block_ids=[g.ticket_blocks(ids, num_tokens) for g, ids in zip(self._groups, blocks, strict=True)],
            remote_block_size=[group.ticket_block_size for group in self._groups],
            remote_engine_id=self._listener.engine_id,
            remote_host=self._listener.host,
            remote_port=self._listener.port,
            remote_tp_size=self._listener.tp,
            remote_dcp_size=self._listener.dcp,
            remote_interleave_size=self._listener.interleave,
            remote_cached_tokens=num_tokens - num_external_tokens,
            ticket_id=secrets.token_hex(16),
            num_tokens=num_tokens,
            remote_draft=self._listener.draft,
        )
        self._by_request[request.request_id] = _Issued(ticket)
        self._request_of[ticket.ticket_id] = request.request_id
        held = self._groups[0].holding(blocks[0], ticket.remote_cached_tokens, num_tokens, last=True)
        lost = [block for block in held if block != NULL_BLOCK]
        self._step.expects.append(Expect(request.request_id, ticket.ticket_id, ticket.attempt, ticket.digest(), lost))
        url = params.get("metaserver")
        if not isinstance(url, str):
            self._cancel(ticket.ticket_id, "kv_transfer_params has do_remote_prefill but no metaserver URL")
        elif (refused := self._metaserver.check(url)) is not None:
            self._cancel(ticket.ticket_id, refused)
        else:
            self._posts.append((ticket, url))

    def build_step(self, idle: bool) -> ConsumerStep:
        """The step's metadata for the ranks; new tickets leave for the metaserver only now, so that prefill does
        not ask ranks for a ticket they cannot know yet."""
        for outcome in self._metaserver.poll():
            if outcome.ok:
                self._step.prefilled.append(outcome.key)
            else:
                self._cancel(outcome.key, outcome.reason)
        step, self._step = self._step, ConsumerStep()
        step.idle = idle
        for ticket, url in self._posts:
            self._metaserver.post(ticket.ticket_id, url, msgspec.to_builtins(ticket))
        self._posts.clear()
        return step

    def update(self, report: WorkerReport | None, finished_recving: set[str]) -> None:
        """Takes note of what the ranks reported."""
        if report is not None:
            for ticket_id, reason in report.failed.items():
                # One rank failed: the others need not wait any longer.
                self._cancel(ticket_id, reason)
            for ticket_id, (num_bytes, before_end) in report.received.items():
                issued = self._by_request.get(self._request_of.get(ticket_id, ""))
                if issued is not None:
                    got = issued.received
                    issued.received = (got[0] + num_bytes, got[1] + before_end)
        for request_id in finished_recving:
            if issued := self._by_request.get(request_id):
                issued.open = False
                self._forget_if_over(request_id, issued)

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """The request ended. Returns what the response says about its transfer."""
        issued = self._by_request.get(request.request_id)
        if issued is None:
            return None
        issued.finished = True
        if issued.open:
            self._cancel(issued.ticket.ticket_id, "the request was aborted")
        self._forget_if_over(request.request_id, issued)
        if issued.failure is not None:
            return {"error": issued.failure}
        return {"received_bytes": issued.received[0], "bytes_before_prefill_end": issued.received[1]}

    def close(self) -> None:
        self._metaserver.close()

    def _cancel(self, ticket_id: str, reason: str) -> None:
        issued = self._by_request.get(self._request_of.get(ticket_id, ""))
        if issued is None or not issued.open or issued.failure is not None:
            return
        issued.failure = reason
        self._posts = [(ticket, url) for ticket, url in self._posts if ticket.ticket_id != ticket_id]
        self._metaserver.cancel(ticket_id)
        self._step.cancelled[ticket_id] = reason

    def _forget_if_over(self, request_id: str, issued: _Issued) -> None:
        if issued.finished and not issued.open:
            del self._by_request[request_id]
            del self._request_of[issued.ticket.ticket_id]
