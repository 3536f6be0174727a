# SPDX-License-Identifier: Apache-2.0
"""Sends a ticket's prompt to a prefill engine. If that fails, a new decode request follows, with a ticket of its own.

A ticket has one prefill engine: others are asked only as long as none may have begun with it (`EnginePool.open`).
"""

from __future__ import annotations

import time

import anyio.lowlevel

from vllm_ascend_pd.proxy.http.bodies import prefill_body, tokens_body
from vllm_ascend_pd.proxy.http.endpoints import Endpoint
from vllm_ascend_pd.proxy.http.errors import error_response
from vllm_ascend_pd.proxy.http.streams import TooLarge, read_all
from vllm_ascend_pd.proxy.rendezvous.decode_attempt import DecodeAttempt, TicketProgress
from vllm_ascend_pd.proxy.rendezvous.observer import PROMPT, REQUEST_ID, Attributes, Observer, Span
from vllm_ascend_pd.proxy.rendezvous.prefill_answer import failed, judge
from vllm_ascend_pd.proxy.rendezvous.request_table import TicketMatch
from vllm_ascend_pd.proxy.rendezvous.tickets import ParsedTicket
from vllm_ascend_pd.proxy.routing.answers import (
    EngineRole,
    Failure,
    FailureKind,
    Then,
    engines_to_avoid,
    last_resorts,
    without,
)
from vllm_ascend_pd.proxy.routing.checks import StallWatch
from vllm_ascend_pd.proxy.routing.engine_pool import EngineCall, EngineError, EnginePool, OutgoingRequest
from vllm_ascend_pd.proxy.routing.registry import EngineRanking
from vllm_ascend_pd.proxy.routing.strategies import prompt_of

# A prefill engine answers with one token. A longer answer is no completion.
_MAX_PREFILL_ANSWER_BYTES = 8 * 1024 * 1024


class PrefillRequests:
    """The prefill side of all tickets. It holds no state of single tickets."""

    def __init__(self, pool: EnginePool, watch: StallWatch, observer: Observer, *, attempts: int) -> None:
        """
        Args:
            pool: the prefill engines.
            watch: ends prefills at engines that have stopped.
            observer: receives reports about attempts.
            attempts: how many prefills one prompt may have, over all decode attempts.
        """
        self._pool = pool
        self._watch = watch
        self._observer = observer
        self._attempts = attempts

    def in_flight(self, call: EngineCall) -> bool:
        """Whether a prefill is at an engine, or waits for one."""
        return call in self._watch

    def used_up(self, progress: TicketProgress, more: int = 0) -> bool:
        """Whether all allowed prefills of a ticket's prompt have failed, if `more` fail than are recorded."""
        return len(progress.failures) + more >= self._attempts

    async def run(self, match: TicketMatch, ticket: ParsedTicket, progress: TicketProgress) -> list[Failure]:
        """Prefills the ticket's prompt. Returns nothing if that succeeded, else why all prefills of the prompt failed,
        those under earlier decode attempts included. The decode attempt has ended if another one follows."""
        proxied, attempt, request, prompt, _ = match
        pool = self._pool
        failures = progress.failures
        if self.used_up(progress):
            return failures
        avoid = without(pool.engines.urls, frozenset(), proxied.failed_prefill)
        ranking = pool.engines.rank(prompt_of(request, prompt), avoid, proxied.prefills)
        # Where decode computes the prompt at last, an engine that may have died of it is not asked twice.
        accidents = [failure for failure in failures if failure.then(EngineRole.PREFILL) is Then.ANEW]
        ranking = ranking.then(last_resorts(EngineRole.PREFILL, accidents, avoid))
        failure = await self._attempt(match, ticket, progress, ranking)
        pool.judge(progress.call.engine, failure and failure.kind)
        if failure is None:
            return []
        self._observer.attempt_failed(EngineRole.PREFILL, failure, attempt.request_id)
        if progress.given_up:  # decode reported a failure, which was recorded if an engine had been asked
            return failures or [failure]
        proxied.prefill_failed(progress, failure)
        if attempt.over:
            proxied.inherit(prompt, progress)
            return failures
        # A task that is cancelled just as it resumes would otherwise continue.
        await anyio.lowlevel.checkpoint_if_cancelled()
        if (
            attempt.may_begin_anew
            and engines_to_avoid(EngineRole.PREFILL, pool.engines.urls, failures, self._attempts) is not None
        ):
            attempt.note_transfer_failure(_as_transfer_failure(failure, attempt))
            proxied.begin_anew(attempt, prompt, progress)
        return failures

    async def _attempt(
        self, match: TicketMatch, ticket: ParsedTicket, progress: TicketProgress, ranking: EngineRanking
    ) -> Failure | None:
        """Prefills at one engine. The stall watch, or a report from decode, may end it early."""
        failure: Failure | None = None
        call = progress.call = EngineCall()
        begun = time.monotonic()
        about: Attributes = {REQUEST_ID: match.attempt.request_id, PROMPT: match.prompt}
        with match.attempt.span.child("prefill", about) as span:
            try:
                with self._watch.over(call), call.scope:
                    failure = await self._send(match, ticket, ranking, call, span)
            finally:
                span.asked(call.engines)
            if call.cut is not None:
                failure = failed(*call.cut, call.engine)
            if failure is not None:
                span.failed(failure)
        if failure is None:
            self._observer.prefilled(time.monotonic() - begun)
            self._pool.prefilled(call)
        return failure

    async def _send(
        self, match: TicketMatch, ticket: ParsedTicket, ranking: EngineRanking, call: EngineCall, span: Span
    ) -> Failure | None:
        _, attempt, request, prompt, _ = match
        base = ticket.header.is_for_base_model
        if ticket.token_ids is None:
            path, body = request.endpoint.value, prefill_body(request, prompt, ticket.encoded, attempt.request_id, base)
        else:
            path, body = Endpoint.COMPLETIONS.value, tokens_body(request, ticket.token_ids, ticket.encoded, base)
        sent = OutgoingRequest("POST", path, span.onto(attempt.prefill_headers), body, attempt.request_id)
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


def _as_transfer_failure(failure: Failure, attempt: DecodeAttempt) -> Failure:
    """A failed prefill as the failure of its decode attempt. Only the log gets the prefill engine's address."""
    before = f"prefill at {failure.url} failed: "
    unquoted = before + failure.for_all
    return Failure(FailureKind.TRANSFER, before + failure.reason, attempt.engine, failure.answer, unquoted)
