# SPDX-License-Identifier: Apache-2.0
"""Passes a decode engine's response on to the client, and finds the reason where it is an error."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from http import HTTPStatus

import anyio
import anyio.lowlevel
from starlette.responses import Response

from vllm_ascend_pd.proxy.http.endpoints import error_event
from vllm_ascend_pd.proxy.http.engine_client import EngineResponse
from vllm_ascend_pd.proxy.http.messages import TooLarge, client_response_headers, error_response, excerpt, read_all
from vllm_ascend_pd.proxy.http.streams import (
    NAMED_WITHIN_BYTES,
    Events,
    Opening,
    error_of,
    names_no_reason,
    opening,
    split_errors,
)
from vllm_ascend_pd.proxy.rendezvous.observer import Observer
from vllm_ascend_pd.proxy.rendezvous.request_table import DecodeAttempt
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind, is_page, kind_of

_MAX_HELD_BYTES = 64 * 1024
"""The first events of a stream are held back until one has content. Longer ones certainly have."""
_MAX_ERROR_BYTES = 1024 * 1024
_REASON_SECONDS = 5.0
"""Decode reports in a message of its own why a transfer failed. That may arrive after its response."""


class ResponseRelay:
    """Relays the response of one attempt.

    While the client has got nothing, a failure is returned instead of passed on, so that another engine can be asked.
    """

    def __init__(self, attempt: DecodeAttempt, observer: Observer) -> None:
        self._attempt = attempt
        self._reply = attempt.proxied.reply
        self._observer = observer

    async def run(self, response: EngineResponse) -> Failure | None:
        """Passes the response on. Returns how it failed, or None. Raises EngineError's causes."""
        self._attempt.heard()
        if response.status >= 500:
            return await self._server_error(response)
        if response.status < 400 and is_page(response.header("Content-Type")):
            reason = f"HTTP {response.status} with a page: is it vLLM?"
            answer = error_response(HTTPStatus.BAD_GATEWAY, f"decode engine: {reason}")
            return Failure(FailureKind.GARBAGE, reason, self._attempt.engine, answer)
        if response.is_event_stream and response.header("Content-Encoding") is None:
            return await self._relay_events(response)
        await self._relay_body(response)
        return None

    async def _relay_body(self, response: EngineResponse) -> None:
        # The headers may come long before the body. They are held back with it, so that a failed prefill can still
        # become the client's status.
        chunks = self._chunks(response)
        first = b""
        async for chunk in chunks:
            first += chunk
            if len(first) >= NAMED_WITHIN_BYTES:
                break
        await self._begin(response, first)
        async for chunk in chunks:
            await self._reply.write(chunk)
        await self._reply.finish()

    async def _relay_events(self, response: EngineResponse) -> Failure | None:
        chunks = self._chunks(response)
        events = Events(_MAX_HELD_BYTES)
        held = b""
        async for chunk in chunks:
            held += events.feed(chunk)
            found = opening(held)
            if found is Opening.FAILED:
                found_in = self._error_event(held, "as the first event")
                return found_in if found_in.kind is FailureKind.BUSY else await self._explained(found_in)
            if found is Opening.CONTENT or len(held) > _MAX_HELD_BYTES:
                break
        else:  # vLLM 0.30 ends a completion like this if its transfer has failed
            reason = "its stream ended without an answer"
            answer = error_response(HTTPStatus.BAD_GATEWAY, f"decode engine: {reason}")
            return await self._explained(Failure(FailureKind.ERROR, reason, self._attempt.engine, answer))
        await self._begin(response, b"")
        if self._attempt.prefilled_at is not None:
            self._observer.after_prefill_seconds.observe(time.monotonic() - self._attempt.prefilled_at)
        failure = await self._write_events(held)
        async for chunk in chunks:
            failure = await self._write_events(events.feed(chunk)) or failure
        failure = await self._write_events(events.rest()) or failure
        await self._reply.finish()
        return failure

    async def _chunks(self, response: EngineResponse) -> AsyncIterator[bytes]:
        """The response's body. While the client takes a chunk, nothing is expected from the engine."""
        async for chunk in response.chunks():
            self._attempt.pause()
            yield chunk
            self._attempt.heard()

    async def _begin(self, response: EngineResponse, first: bytes) -> None:
        # A task that is cancelled just as it resumes would otherwise continue, and another attempt could not follow.
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._attempt.answering = True
        await self._reply.start(response)
        await self._reply.write(first)

    async def _write_events(self, events: bytes) -> Failure | None:
        """Passes events on. vLLM's error event has no reason when a transfer has failed: replaces it by one that has.
        Returns the failure that an error event shows."""
        failure: Failure | None = None
        for part, status in split_errors(events):
            known = await self.transfer_failure() if status >= 500 else None
            if status >= 500:
                failure = known or self._error_event(part, "after tokens")
            await self._reply.write(
                part if known is None else error_event(self._attempt.proxied.path, bytes(known.answer.body))
            )
        return failure

    async def _server_error(self, response: EngineResponse) -> Failure:
        """The failure behind an HTTP 5xx."""
        status = f"HTTP {response.status}"
        engine = self._attempt.engine
        try:
            body = await read_all(response.chunks(), _MAX_ERROR_BYTES)
        except TooLarge:
            reason = f"{status} with a body of more than {_MAX_ERROR_BYTES} bytes"
            answer = error_response(_as_http_status(response.status), f"decode engine: {reason}")
            return await self._explained(Failure(FailureKind.ERROR, reason, engine, answer))
        passed_on = Response(body, status_code=response.status)
        passed_on.raw_headers = client_response_headers(response.headers)
        failure = Failure(FailureKind.ERROR, f"{status}: {excerpt(body)}", engine, passed_on, status)
        return await self._explained(failure)

    async def _explained(self, failure: Failure) -> Failure:
        """The best known reason for an error before the client has got anything: a reported transfer failure, a guess
        if the error has no reason, or the error itself."""
        return await self.transfer_failure() or self._guess(failure.answer) or failure

    async def transfer_failure(self) -> Failure | None:
        """Why KV did not come, if that is the reason of an error. Waits a moment for decode to report it."""
        if self._attempt.may_report:
            with anyio.move_on_after(_REASON_SECONDS):
                await self._attempt.transfer_failed.wait()
        return self._attempt.transfer_failure

    def _guess(self, answer: Response) -> Failure | None:
        """What the attempt's tickets tell about an error without a reason."""
        attempt = self._attempt
        if attempt.proxied.request is None or not names_no_reason(bytes(answer.body)):
            return None
        if not attempt.tickets:
            reason = "it failed before it posted any ticket here: can it reach the metaserver?"
        elif any(ticket.left for ticket in attempt.tickets.values()):
            reason = "it gave up waiting for prefill"
        else:
            reason = f"it failed without a reason: see its log, request {attempt.request_id}"
        explained = error_response(_as_http_status(answer.status_code), f"decode engine: {reason}")
        return Failure(FailureKind.ERROR, reason, attempt.engine, explained)

    def _error_event(self, events: bytes, where: str) -> Failure:
        """The failure that an error event shows. vLLM may find only in a stream that it is busy. Then it has begun with
        nothing, and has posted no ticket."""
        status, body = error_of(events)
        answer = Response(body, status_code=status, media_type="application/json")
        unquoted = f"an error, {status}, {where}"
        kind = kind_of(EngineRole.DECODE, status, None, body, well=True)
        if kind is FailureKind.BUSY and not (self._attempt.answering or self._attempt.begun):
            return Failure(kind, unquoted, self._attempt.engine, answer)
        return Failure(FailureKind.ERROR, excerpt(body), self._attempt.engine, answer, unquoted)


def _as_http_status(status: int) -> HTTPStatus:
    """Engines, and proxies before them, use codes that HTTP does not define, such as 529. Those become 502."""
    try:
        return HTTPStatus(status)
    except ValueError:
        return HTTPStatus.BAD_GATEWAY
