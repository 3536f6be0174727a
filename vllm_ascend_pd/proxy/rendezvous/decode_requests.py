# SPDX-License-Identifier: Apache-2.0
"""Sends a client's request to one decode engine after the other, until one answers or no attempt is left."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import NamedTuple

from vllm_ascend_pd.core.ticket import BY_DECODE, BY_PREFILL
from vllm_ascend_pd.proxy.http.bodies import decode_body
from vllm_ascend_pd.proxy.http.endpoints import REQUEST_FORMATS, Endpoint
from vllm_ascend_pd.proxy.http.errors import error_response
from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.http.renaming import Renaming
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.rendezvous.decode_advice import DecodeAdvice
from vllm_ascend_pd.proxy.rendezvous.decode_attempt import DecodeAttempt
from vllm_ascend_pd.proxy.rendezvous.observer import COMPUTED_BY, REQUESTED, WITHOUT_PREFILL, Observer
from vllm_ascend_pd.proxy.rendezvous.proxied_request import ProxiedRequest
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.rendezvous.response_relay import ResponseRelay
from vllm_ascend_pd.proxy.routing.answers import (
    EngineRole,
    Failure,
    FailureKind,
    engines_to_avoid,
    last_resorts,
    may_follow,
)
from vllm_ascend_pd.proxy.routing.checks import StallWatch
from vllm_ascend_pd.proxy.routing.engine_pool import EngineError, EnginePool, OutgoingRequest
from vllm_ascend_pd.proxy.routing.registry import EngineRanking
from vllm_ascend_pd.proxy.routing.strategies import NO_PROMPT, prompts_of

log = logging.getLogger(__name__)


class ForwardedRequest(NamedTuple):
    """A client's request as it goes to decode."""

    method: str
    path: str
    endpoint: Endpoint | None
    """What the path's requests look like; None if decode answers them without prefill."""
    headers: Headers
    """The client's."""
    content: bytes
    """The body, if the request needs no prefill. Otherwise the body is made for each attempt."""
    who_computes: str | None = None
    """Who is to compute its prompts by the client's wish, `BY_DECODE` or `BY_PREFILL`; None: it has none."""


class DecodeRequests:
    """The decode side of all client requests. It holds no state of single requests."""

    def __init__(
        self,
        request_table: RequestTable,
        pool: EnginePool,
        prefill: EnginePool,
        watch: StallWatch,
        observer: Observer,
        *,
        attempts: int,
        decode_fallback: bool,
        metaserver_url: str,
    ) -> None:
        """
        Args:
            request_table: registers each attempt, so that tickets find it.
            pool: the decode engines.
            prefill: the prefill engines. Decode is told whether any is well.
            watch: ends attempts at engines that have stopped.
            observer: receives reports about attempts.
            attempts: how many engines may be asked for one request.
            decode_fallback: whether decode may be asked to compute prompts while no prefill engine is well.
            metaserver_url: where decode engines post their tickets.
        """
        self._request_table = request_table
        self._pool = pool
        self._prefill = prefill
        self._watch = watch
        self._observer = observer
        self._attempts = attempts
        self._decode_fallback = decode_fallback
        self._metaserver_url = metaserver_url

    async def run(self, proxied: ProxiedRequest, forwarded: ForwardedRequest, reply: Reply) -> None:
        """Returns when the client has got a response, or after `proxied.end` with an error."""
        pool = self._pool
        clients_id = reply.request_id
        failures: list[Failure] = []
        number = 1
        prompt = NO_PROMPT if proxied.request is None else prompts_of(proxied.request)
        ranking = pool.engines.rank(prompt)
        advice = DecodeAdvice(
            self._prefill, self._observer, wanted=forwarded.who_computes, may_fall_back=self._decode_fallback
        )

        def another() -> bool:
            return may_follow(pool.role, pool.engines.urls, failures, self._attempts)

        while True:
            with self._request_table.attempt(proxied, forwarded.headers, another) as attempt:
                reply.request_id = clients_id or attempt.request_id
                reply.renaming = _renaming(forwarded, clients_id, attempt)
                failure = await self._attempt(proxied, attempt, ranking, forwarded, advice, reply)
                if failure is not None:
                    attempt.span.failed(failure)
            if failure is None:
                return
            self._observer.attempt_failed(EngineRole.DECODE, failure, attempt.request_id)
            pool.judge(failure.url, failure.kind)
            if reply.started or not advice.may_begin_anew(failure):
                failures.append(failure)
            avoid = engines_to_avoid(pool.role, pool.engines.urls, failures, self._attempts)
            if reply.started or avoid is None:
                self._give_up(proxied, attempt, failure)
                return
            others = pool.engines.rank(prompt, avoid)
            ranking = others.then(last_resorts(pool.role, failures, avoid)).of_one_admitted()
            number += 1
            self._note_retry(proxied, attempt, failure, number, ranking.first)

    async def _attempt(
        self,
        proxied: ProxiedRequest,
        attempt: DecodeAttempt,
        ranking: EngineRanking,
        forwarded: ForwardedRequest,
        advice: DecodeAdvice,
        reply: Reply,
    ) -> Failure | None:
        """Asks one engine and passes its response on. Returns how that failed, or None."""
        content = forwarded.content
        if proxied.request is not None:
            content = decode_body(proxied.request, self._metaserver_url, attempt.request_id, advice.params())
            attempt.without_prefill = advice.without_prefill
            _note_advice(attempt, advice)
        sent = OutgoingRequest(forwarded.method, forwarded.path, attempt.decode_headers, content, attempt.request_id)
        relay = ResponseRelay(forwarded.path, attempt, reply, self._observer)
        failure: Failure | None = None
        responded = False
        with self._watch.over(attempt), attempt.scope:
            try:
                async with self._pool.open(ranking, sent, attempt) as response:
                    responded = True
                    failure = await relay.run(response)
                    if failure is None and response.status < 400:
                        self._pool.judge(attempt.engine, None)
                        if proxied.request is not None:
                            attempt.span.note({COMPUTED_BY: BY_DECODE if attempt.prefilled_at is None else BY_PREFILL})
            except EngineError as error:
                failure = Failure(error.kind, str(error), error.url, error_response(error.status, str(error)))
                broken_off = responded and error.kind is FailureKind.LOST and not attempt.answering
                if broken_off and _breaks_off(forwarded.endpoint):
                    failure = await relay.transfer_failure() or failure
            except TimeoutError:
                log.warning("request %s: the client stopped reading: ending its request", attempt.request_id)
                proxied.end(None)
        if attempt.scope.cancelled_caught:
            # Of its transfer failure and its engine's stall, whichever came first has ended the attempt.
            return attempt.transfer_failure or _stalled(attempt)
        return failure

    def _give_up(self, proxied: ProxiedRequest, attempt: DecodeAttempt, failure: Failure) -> None:
        log.warning(
            "request %s: decode at %s failed: %s: the client gets %d",
            attempt.request_id,
            failure.url,
            failure.reason,
            failure.answer.status_code,
        )
        proxied.span.failed(failure)
        proxied.end(failure.answer)

    def _note_retry(
        self, proxied: ProxiedRequest, attempt: DecodeAttempt, failure: Failure, number: int, next_url: str
    ) -> None:
        self._observer.attempt_retried(EngineRole.DECODE)
        proxied.span.retried(failure, next_url)
        log.warning(
            "request %s: decode at %s failed: %s: attempt %d, under another id, goes to %s",
            attempt.request_id,
            failure.url,
            failure.reason,
            number,
            next_url,
        )


def _renaming(forwarded: ForwardedRequest, clients_id: str | None, attempt: DecodeAttempt) -> Renaming | None:
    """How the client's name of the request gets into the answers of those routes that vLLM names after it."""
    named = forwarded.endpoint is not None and REQUEST_FORMATS[forwarded.endpoint].id_field is None
    return Renaming.to(clients_id, attempt.request_id) if clients_id and named else None


def _note_advice(attempt: DecodeAttempt, advice: DecodeAdvice) -> None:
    if advice.wanted is not None:
        attempt.span.note({REQUESTED: advice.wanted})
    if advice.without_prefill:
        attempt.span.note({WITHOUT_PREFILL: True})


def _breaks_off(endpoint: Endpoint | None) -> bool:
    """Whether vLLM closes the connection, without an error event, when a stream of this endpoint fails."""
    return endpoint is not None and REQUEST_FORMATS[endpoint].breaks_off


def _stalled(attempt: DecodeAttempt) -> Failure | None:
    """The failure of an attempt that was ended because its engine has stopped."""
    if attempt.cut is None:
        return None
    kind, reason = attempt.cut
    return Failure(kind, reason, attempt.engine, error_response(HTTPStatus.GATEWAY_TIMEOUT, reason))
