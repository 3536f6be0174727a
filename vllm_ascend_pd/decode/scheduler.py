# SPDX-License-Identifier: Apache-2.0
"""The decode side of the scheduler: issues a ticket per request, and follows it until its KV has arrived."""

import logging
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.connector.cached_tokens import count_own, count_prefills
from vllm_ascend_pd.connector.compat import external_request_id
from vllm_ascend_pd.connector.old_weights import OldWeights
from vllm_ascend_pd.connector.prompts import Prompts, text_alone
from vllm_ascend_pd.connector.spans import EARLY_BYTES, RECEIVED_BYTES, REQUEST_ID, TOKENS, TransferSpan
from vllm_ascend_pd.core import stats
from vllm_ascend_pd.core.failure import ReceiveFailure
from vllm_ascend_pd.core.groups import CacheGroup
from vllm_ascend_pd.core.metaserver import MAX_REASON_CHARS, TransferFailure
from vllm_ascend_pd.core.plan import NULL_BLOCK
from vllm_ascend_pd.core.protocol import RankDescription
from vllm_ascend_pd.core.signing import Secret, signed
from vllm_ascend_pd.core.step import DecodeStep, Expect, WorkerReport
from vllm_ascend_pd.core.ticket import Ticket, wants_ticket, wants_token_ids
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.who_computes import decode_computes
from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.decode import UNTRACED, DecodeTrace
from vllm_ascend_pd.transport.idle_wait import IdleWait

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_CLOSE_TRACE_S = 2.0
_ABORTED = "the request was aborted"


@dataclass
class _Issued:
    """A ticket we gave out. `url`: where it was posted. `open` until every rank has reported that it ended. `given_up`:
    the last attempt that failed, and why. `cached_tokens`: of the prompt, what prefill had cached; None: no rank has
    received its KV."""

    ticket: Ticket
    span: TransferSpan
    url: str | None = None
    open: bool = True
    finished: bool = False
    failure: str | None = None
    cause: ReceiveFailure | None = None
    given_up: tuple[int, str] | None = None
    received: tuple[int, int] = (0, 0)
    cached_tokens: int | None = None
    issued_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Post:
    """A ticket that leaves with the next step, and the prompt's token ids if the metaserver wants them."""

    ticket: Ticket
    url: str
    token_ids: list[int]


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


@dataclass(frozen=True)
class Signer:
    """Signs tickets that are good for `lifetime_s`."""

    secret: Secret
    lifetime_s: float

    def sign(self, ticket: Ticket) -> Ticket:
        return signed(ticket, self.secret, math.ceil(time.time() + self.lifetime_s))


class DecodeScheduler:
    """`signer`: None where tickets need no signature."""

    def __init__(
        self,
        listener: Listener,
        groups: Sequence[CacheGroup],
        metaserver: MetaserverClient,
        idle: IdleWait,
        signer: Signer | None = None,
        trace: DecodeTrace = UNTRACED,
        prompts: Prompts | None = None,
    ) -> None:
        self._signer = signer
        self._prompts = prompts or Prompts()
        self._trace = trace
        self._listener = listener
        self._groups = list(groups)
        # Decode computes the prompt's last token. KV may be written twice; but a state must not have seen that token
        # yet, and of a window vLLM keeps what the token after the received ones sees: that must be this one.
        self._left_to_decode = int(any(group.holds_state or group.windowed for group in groups))
        self._metaserver = metaserver
        self._idle = idle
        self._by_request: dict[str, _Issued] = {}
        self._request_of: dict[str, str] = {}  # ticket id -> request id
        self._step = DecodeStep()
        self._stats = stats.Stats()
        self._retried = 0  # posts, as counted last
        self._posts: list[_Post] = []
        self._pool: BlockPool | None = None
        self._old_weights = OldWeights()

    def bind(self, pool: "BlockPool") -> None:
        """`pool`: which all groups' blocks are from."""
        self._pool = pool
        self._old_weights.bind(pool)

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int:
        """How many of the prompt's tokens prefill will deliver. Has no side effects."""
        if not wants_ticket(request.kv_transfer_params) or request.request_id in self._by_request:
            return 0
        if request.num_output_tokens:  # preempted: prefill could still fail, when its client has tokens already
            return 0
        if request.skip_reading_prefix_cache:  # logprobs of the prompt, say: decode has to compute all of it
            return 0
        if decode_computes(request, num_computed_tokens, self._groups, self._pool):
            return 0
        return max(0, int(request.num_prompt_tokens) - self._left_to_decode - num_computed_tokens)

    def allocated(self, request: "Request", blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Issues the request's ticket. Called once more when decode starts, after `update` has heard how its transfer
        ended: then only what counts as cached is corrected."""
        self._old_weights.begins(request)
        if issued := self._by_request.get(request.request_id):
            _correct_cached_tokens(request, issued)
            return
        if num_external_tokens == 0:
            return
        params = request.kv_transfer_params or {}
        num_tokens = request.num_prompt_tokens - self._left_to_decode
        ticket_id = secrets.token_hex(16)
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
            ticket_id=ticket_id,
            num_tokens=num_tokens,
            remote_draft=self._listener.draft,
            prompt=self._prompts.digest(request, num_tokens, ticket_id),
        )
        if self._signer is not None:
            ticket = self._signer.sign(ticket)
        self._by_request[request.request_id] = _Issued(ticket, TransferSpan("kv_receive", request))
        self._request_of[ticket.ticket_id] = request.request_id
        self._trace.mark(events.ISSUED, ticket.request_id, ticket.ticket_id)
        # Of all groups: of one with chunked attention decode holds nothing where a chunk ends with the prompt.
        held = [
            group.holding(ids, ticket.remote_cached_tokens, num_tokens, last=True)
            for group, ids in zip(self._groups, blocks, strict=True)
        ]
        lost = [block for ids in held for block in ids if block != NULL_BLOCK]
        cached, digest = ticket.remote_cached_tokens, ticket.digest()
        expect = Expect(request.request_id, ticket.ticket_id, ticket.attempt, digest, lost, cached)
        self._step.expects.append(expect)
        url = params.get("metaserver")
        if not isinstance(url, str):
            reason = "kv_transfer_params has do_remote_prefill but no metaserver URL"
            self._cancel(ticket.ticket_id, reason, ReceiveFailure.NOT_POSTED)
        elif (refused := self._metaserver.check(url)) is not None:
            self._cancel(ticket.ticket_id, refused, ReceiveFailure.NOT_POSTED)
        else:
            token_ids = text_alone(request) if wants_token_ids(params) else None
            self._posts.append(_Post(ticket, url, token_ids or []))
            self._by_request[request.request_id].url = url

    def build_step(self, computes: bool) -> DecodeStep:
        """The metadata for the ranks of a step that `computes` something or not; new tickets leave for the metaserver
        only now, so that prefill does not ask ranks for a ticket they cannot know yet."""
        if not computes and self._step == DecodeStep():
            self._idle.pause()
        for outcome in self._metaserver.poll():
            if outcome.ok:
                self._step.prefilled.append(outcome.key)
            else:
                self._cancel(outcome.key, self._why(outcome.key, outcome.reason), ReceiveFailure.PREFILL)
        step, self._step = self._step, DecodeStep()
        step.wait_s = self._idle.next(computes, news=step != DecodeStep())
        step.doorbell = self._idle.doorbell
        step.weight_updates = self._old_weights.known_updates
        for post in self._posts:
            body = {**msgspec.to_builtins(post.ticket), "token_ids": post.token_ids}
            self._metaserver.post(post.ticket.ticket_id, post.url, body)
        self._posts.clear()
        return step

    def update(self, report: WorkerReport | None, finished_recving: set[str]) -> None:
        """Takes note of what the ranks reported."""
        if report is not None:
            self._old_weights.reported(report.weight_updates)
            for ticket_id, (attempt, reason) in report.given_up.items():
                issued = self._issued(ticket_id)
                if issued is not None and (issued.given_up is None or issued.given_up[0] < attempt):
                    issued.given_up = (attempt, reason)
                    self._stats.add(stats.ATTEMPTS_GIVEN_UP)
                    if ticket_id not in report.failed:
                        self._tell(issued, attempt, reason, final=False)
            for ticket_id, reason in report.failed.items():
                # One rank failed: the others need not wait any longer.
                if issued := self._issued(ticket_id):
                    attempt = issued.given_up[0] if issued.given_up else issued.ticket.attempt
                    self._tell(issued, attempt, reason, final=True)
                self._cancel(ticket_id, reason, ReceiveFailure.TRANSFER)
            for ticket_id, tokens in report.cached.items():
                if issued := self._issued(ticket_id):
                    known = issued.cached_tokens
                    issued.cached_tokens = tokens if known is None else min(known, tokens)
            for ticket_id, (num_bytes, before_end) in report.received.items():
                if issued := self._issued(ticket_id):
                    got = issued.received
                    issued.received = (got[0] + num_bytes, got[1] + before_end)
        for request_id in finished_recving:
            if issued := self._by_request.get(request_id):
                issued.open = False
                how = events.READY if issued.failure is None else events.FAILED
                self._trace.mark(how, issued.ticket.request_id, issued.ticket.ticket_id)
                if issued.failure is None:
                    self._stats.observe(stats.TICKET_TO_READY_SECONDS, time.monotonic() - issued.issued_at)
                _end_span(issued)
                self._forget_if_over(request_id, issued)

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """The request ended. Returns what the response says about its transfer."""
        issued = self._by_request.get(request.request_id)
        if issued is None:
            return None
        issued.finished = True
        if issued.open:
            if request.status == RequestStatus.FINISHED_ERROR:
                # vLLM ends a request whose KV is lost before it hands on what its ranks say of that: `update` hears it.
                return {"error": issued.failure or "its KV was lost"}
            self._cancel(issued.ticket.ticket_id, _ABORTED, ReceiveFailure.ABORTED)
        self._forget_if_over(request.request_id, issued)
        if issued.failure is not None:
            return {"error": issued.failure}
        return {"received_bytes": issued.received[0], "bytes_before_prefill_end": issued.received[1]}

    def described(self, ranks: Iterable[RankDescription]) -> None:
        """What this engine's ranks say of themselves, once they have started."""
        for rank in ranks:
            facts = msgspec.structs.astuple(rank.transport)
            self._stats.state(stats.TRANSPORT_INFO, facts, f"{rank.pp_rank}/{rank.tp_rank}")

    def take_stats(self) -> stats.Data:
        retried = self._metaserver.retried
        if retried > self._retried:
            self._stats.add(stats.TICKET_POST_RETRIES, retried - self._retried)
            self._retried = retried
        return self._stats.take()

    def close(self) -> None:
        self._metaserver.close()
        self._idle.close()
        self._trace.close(_CLOSE_TRACE_S)

    def _issued(self, ticket_id: str) -> _Issued | None:
        return self._by_request.get(self._request_of.get(ticket_id, ""))

    def _tell(self, issued: _Issued, attempt: int, reason: str, final: bool) -> None:
        """The metaserver: what a rank noticed, so that it asks another prefill engine, or tells the client why not."""
        if issued.url is None or issued.failure is not None:
            return
        ticket, reason = issued.ticket, reason[:MAX_REASON_CHARS]
        failure = TransferFailure(ticket.request_id, ticket.ticket_id, attempt, reason, final)
        self._metaserver.tell_failure(issued.url, failure)

    def _cancel(self, ticket_id: str, reason: str, cause: ReceiveFailure) -> None:
        issued = self._issued(ticket_id)
        if issued is None or not issued.open or issued.failure is not None:
            return
        issued.failure, issued.cause = reason, cause
        self._stats.add(stats.RECEIVE_FAILURES, reason=cause.value)
        self._posts = [post for post in self._posts if post.ticket.ticket_id != ticket_id]
        self._metaserver.cancel(ticket_id)
        self._step.cancelled[ticket_id] = reason

    def _why(self, ticket_id: str, outcome: str) -> str:
        """What a rank has seen fail says more than what the proxy makes of it."""
        issued = self._issued(ticket_id)
        return outcome if issued is None or issued.given_up is None else issued.given_up[1]

    def _forget_if_over(self, request_id: str, issued: _Issued) -> None:
        if issued.finished and not issued.open:
            del self._by_request[request_id]
            del self._request_of[issued.ticket.ticket_id]


def _correct_cached_tokens(request: "Request", issued: _Issued) -> None:
    if issued.open:
        return
    if issued.failure is None:
        count_prefills(request, issued.cached_tokens or 0)
    else:
        count_own(request)


def _end_span(issued: _Issued) -> None:
    ticket, cause = issued.ticket, issued.cause
    about: dict[str, str | int] = {
        REQUEST_ID: ticket.request_id,
        TOKENS: ticket.num_tokens - ticket.remote_cached_tokens,
        RECEIVED_BYTES: issued.received[0],
        EARLY_BYTES: issued.received[1],
    }
    # Why prefill failed is the metaserver's text, which may quote what an engine said of a prompt.
    reason = "" if cause is ReceiveFailure.PREFILL else issued.failure or ""
    issued.span.end(about, None if cause is None else cause.value, reason)
