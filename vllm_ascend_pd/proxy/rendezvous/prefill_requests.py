# SPDX-License-Identifier: Apache-2.0
"""The prefill side of a ticket: reads it, sends its prompt to a prefill engine, and judges the answer.

A ticket has one prefill engine: others are asked only as long as none may have begun with it (`EnginePool.open`). If it
fails, a new decode request follows, with a ticket of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, NamedTuple

import anyio.lowlevel
import msgspec
from starlette.responses import Response

from vllm_ascend_pd.core.protocol import MAX_FAILURE_CHARS
from vllm_ascend_pd.core.text import UNREADABLE, is_name, one_line
from vllm_ascend_pd.proxy.http.bodies import ClientRequest, prefill_body, tokens_body
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.messages import TooLarge, error_response, excerpt, read_all
from vllm_ascend_pd.proxy.rendezvous.observer import Observer
from vllm_ascend_pd.proxy.rendezvous.request_table import TicketProgress
from vllm_ascend_pd.proxy.routing.answers import (
    EngineRole,
    Failure,
    FailureKind,
    Then,
    engines_to_avoid,
    kind_of,
    last_resorts,
)
from vllm_ascend_pd.proxy.routing.engine_pool import EngineCall, EngineError, EnginePool, OutgoingRequest
from vllm_ascend_pd.proxy.routing.registry import EngineRanking
from vllm_ascend_pd.proxy.routing.strategies import prompt_of

_MAX_PREFILL_ANSWER_BYTES = 8 * 1024 * 1024
"""A prefill engine answers with one token. A longer answer is no completion."""


class _Prompt(msgspec.Struct, frozen=True):
    adapter: str = ""


class TicketHeader(msgspec.Struct, frozen=True):
    """The fields of a ticket that the proxy reads. Raises ValueError for names that cannot be logged."""

    request_id: str
    """The decode engine's name for its request."""
    remote_engine_id: str
    """The decode engine's id."""
    ticket_id: str = ""
    """Empty for tickets of other connectors."""
    prompt: _Prompt | None = None
    """What decides the prompt's KV. None if the ticket does not tell it."""
    replaces: str = ""
    """The id of an earlier ticket of the same request, whose transfer has ended. Decode lost the KV again, by a
    preemption for instance. So this ticket is for the prompt and all tokens generated since. Empty for first ones."""

    @property
    def is_for_base_model(self) -> bool:
        """Whether the request uses no adapter, by whatever name the client called the model."""
        return self.prompt is not None and not self.prompt.adapter

    def __post_init__(self) -> None:
        if not (is_name(self.request_id) and is_name(self.remote_engine_id)):
            raise ValueError("request_id or remote_engine_id is too long or has unprintable characters")


class ParsedTicket(NamedTuple):
    """A ticket as the decode engine posted it, taken apart."""

    header: TicketHeader
    encoded: bytes
    """The ticket as prefill gets it: byte for byte, without the token ids."""
    token_ids: msgspec.Raw | None = None
    """The prompt's token ids as an encoded JSON list: a Python int takes more memory than its digits."""


_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]


def read_ticket(body: bytes) -> ParsedTicket:
    """Reads a posted ticket. Raises msgspec.DecodeError, or another error of `UNREADABLE`, if it is none."""
    header = msgspec.json.decode(body, type=TicketHeader)
    if not header.ticket_id:  # another connector's ticket: its engines use all of it
        return ParsedTicket(header, body)
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    token_ids = fields.pop("token_ids", None)
    if token_ids is None or not msgspec.json.decode(token_ids, type=_TokenIds):
        return ParsedTicket(header, body)
    return ParsedTicket(header, msgspec.json.encode(fields), token_ids)


class PrefillRequests:
    """The prefill side of all tickets. It holds no state of single tickets."""

    def __init__(self, pool: EnginePool, observer: Observer, *, attempts: int) -> None:
        """
        Args:
            pool: the prefill engines.
            observer: receives reports about attempts.
            attempts: how many prefills one prompt may have, over all decode attempts.
        """
        self._pool = pool
        self._observer = observer
        self._attempts = attempts

    def in_flight(self, call: EngineCall) -> bool:
        """Whether a prefill is at an engine, or waits for one."""
        return call in self._pool.watch

    def used_up(self, progress: TicketProgress) -> bool:
        """Whether all allowed prefills of a ticket's prompt have failed."""
        return len(progress.failures) >= self._attempts

    def may_follow(self, failures: Sequence[Failure]) -> bool:
        """Whether another prefill of a prompt may succeed. `failures`: of all so far."""
        return engines_to_avoid(EngineRole.PREFILL, self._pool.engines.urls, failures, self._attempts) is not None

    async def run(self, request: ClientRequest, ticket: ParsedTicket, progress: TicketProgress) -> list[Failure]:
        """Prefills the ticket's prompt. Returns nothing if that succeeded, else why all prefills of the prompt failed,
        those under earlier decode attempts included. The decode attempt has ended if another one follows."""
        attempt, failures, engines = progress.attempt, progress.failures, self._pool.engines
        proxied = attempt.proxied
        if self.used_up(progress):
            return failures
        failed_before = frozenset(proxied.failed_prefill)
        avoid = failed_before if set(engines.urls) - failed_before else frozenset[str]()
        ranking = engines.rank(prompt_of(request, progress.prompt), avoid, proxied.prefills)
        # Where decode computes the prompt at last, an engine that may have died of it is not asked twice.
        accidents = [failure for failure in failures if failure.then(EngineRole.PREFILL) is Then.ANEW]
        ranking = ranking.then(last_resorts(EngineRole.PREFILL, accidents, avoid))
        failure = await self._attempt(request, ticket, progress, ranking)
        self._pool.judge(progress.call.engine, failure and failure.kind)
        if failure is None:
            return []
        self._observer.attempt_failed(EngineRole.PREFILL, failure, attempt.request_id)
        if progress.given_up:  # decode reported a failure, which was recorded if an engine had been asked
            return failures or [failure]
        proxied.prefill_failed(progress, failure)
        if attempt.over:
            proxied.inherit(progress)
            return failures
        # A task that is cancelled just as it resumes would otherwise continue.
        await anyio.lowlevel.checkpoint_if_cancelled()
        if attempt.may_begin_anew and self.may_follow(failures):
            # Only the log gets the prefill engine's address.
            before = f"prefill at {failure.url} failed: "
            reason, unquoted = before + failure.reason, before + failure.for_all
            attempt.note_transfer_failure(
                Failure(FailureKind.TRANSFER, reason, attempt.engine, failure.answer, unquoted)
            )
            proxied.begin_anew(progress)
        return failures

    async def _attempt(
        self, request: ClientRequest, ticket: ParsedTicket, progress: TicketProgress, ranking: EngineRanking
    ) -> Failure | None:
        """Prefills at one engine. The stall watch, or a report from decode, may end it early."""
        failure: Failure | None = None
        call = progress.call = EngineCall()
        begun = time.monotonic()
        with self._pool.watch.over(call), call.scope:
            failure = await self._send(request, ticket, progress, ranking)
        if call.cut is not None:
            failure = failed(*call.cut, call.engine)
        if failure is None:
            self._observer.prefilled(time.monotonic() - begun)
            self._pool.prefilled(call)
        return failure

    async def _send(
        self, request: ClientRequest, ticket: ParsedTicket, progress: TicketProgress, ranking: EngineRanking
    ) -> Failure | None:
        attempt, call, base = progress.attempt, progress.call, ticket.header.is_for_base_model
        if ticket.token_ids is None:
            path = request.endpoint.value
            body = prefill_body(request, progress.prompt, ticket.encoded, attempt.request_id, base)
        else:
            path, body = Endpoint.COMPLETIONS.value, tokens_body(request, ticket.token_ids, ticket.encoded, base)
        sent = OutgoingRequest("POST", path, attempt.prefill_headers, body, attempt.request_id)
        try:
            async with self._pool.open(ranking, sent, call) as response:
                answer = await read_all(response.chunks(), _MAX_PREFILL_ANSWER_BYTES)
        except EngineError as error:
            for_client = error_response(error.status, f"prefill failed: {error}")
            return Failure(error.kind, str(error), error.url, for_client)
        except TooLarge:
            reason = f"the prefill engine's answer exceeds {_MAX_PREFILL_ANSWER_BYTES} bytes"
            return failed(FailureKind.GARBAGE, reason, call.engine)
        return judge(response.status, response.header("Content-Type"), answer, call.engine)


class _TransferResult(msgspec.Struct, frozen=True):
    error: str | None = None
    """Why the transfer failed."""


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    output_tokens: int = 0


class _PrefillAnswer(msgspec.Struct, frozen=True):
    kv_transfer_params: _TransferResult | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    """Tells about answers without `choices`: those of /v1/responses and /v1/messages."""

    @property
    def is_completion(self) -> bool:
        return bool(self.choices) or (self.choices is None and self.usage is not None)

    @property
    def is_aborted(self) -> bool:
        if self.choices is not None:
            return any(choice.finish_reason == "abort" for choice in self.choices)
        return self.usage is not None and self.usage.output_tokens == 0


def judge(status: int, content_type: str | None, body: bytes, url: str) -> Failure | None:
    """Returns how a prefill failed, or None.

    A refusal of a bad request is in words for the client, who gets it unchanged. A failed transfer comes with HTTP 200,
    and so does a prefill that was aborted.
    """
    reason = f"HTTP {status} from the prefill engine"
    kind = kind_of(EngineRole.PREFILL, status, content_type, body, well=False)
    if kind is FailureKind.REFUSED:
        return Failure(kind, reason, url, Response(body, status_code=status, media_type=content_type))
    if kind is not None or not 200 <= status < 300:
        return failed(kind or FailureKind.ERROR, f"{reason}: {excerpt(body)}", url)._replace(unquoted=reason)
    try:
        answer = msgspec.json.decode(body, type=_PrefillAnswer)
    except UNREADABLE as error:
        return failed(FailureKind.GARBAGE, f"the prefill engine's answer is no completion: {error}", url)
    transfer = answer.kv_transfer_params
    if transfer is not None and transfer.error is not None:
        return failed(FailureKind.TRANSFER, one_line(transfer.error, MAX_FAILURE_CHARS), url)
    if not answer.is_completion:
        return failed(FailureKind.GARBAGE, "the prefill engine's answer is no completion: it has no choices", url)
    if answer.is_aborted:
        return failed(FailureKind.ABORTED, "the prefill engine aborted the request", url)
    return None


def failed(kind: FailureKind, reason: str, url: str) -> Failure:
    """A failed prefill. The client gets HTTP 502 with the reason."""
    return Failure(kind, reason, url, error_response(HTTPStatus.BAD_GATEWAY, f"prefill failed: {reason}"))
