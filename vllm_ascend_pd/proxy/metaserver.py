# SPDX-License-Identifier: Apache-2.0
"""The metaserver: a decode engine posts a ticket (which blocks wait for KV, and where), and gets its answer
once a prefill engine has run the prompt, or has failed to."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import NamedTuple

import anyio
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from .bodies import ClientRequest, prefill_body
from .engines import EngineError, EnginePool
from .errors import error_response
from .exchange import Exchange, Exchanges
from .settings import MIB, ProxySettings
from .streams import TooLarge, read_all, when_disconnected

log = logging.getLogger(__name__)

# P answers with one token; more than this is no completion.
_MAX_PREFILL_ANSWER_BYTES = 8 * MIB


class Ticket(msgspec.Struct, frozen=True):
    """The part of a ticket that the proxy reads. The rest is between D and P."""

    request_id: str
    remote_engine_id: str


class _TransferResult(msgspec.Struct, frozen=True):
    error: str | None = None


class _PrefillAnswer(msgspec.Struct, frozen=True):
    kv_transfer_params: _TransferResult | None = None


class PrefillFailure(NamedTuple):
    reason: str
    answer: Response
    """What the client gets, should its request end by this."""

    @classmethod
    def because(cls, reason: str) -> PrefillFailure:
        return cls(reason, error_response(HTTPStatus.BAD_GATEWAY, f"prefill failed: {reason}"))


class Metaserver:
    def __init__(self, settings: ProxySettings, exchanges: Exchanges, prefill: EnginePool) -> None:
        self._settings = settings
        self._exchanges = exchanges
        self._prefill = prefill

    async def post_ticket(self, request: Request) -> Response:
        """200 once P has run the prompt; 400 for what is no ticket; 404 when no request waits for it; 410 when
        that request ended meanwhile; 502 when the prefill failed. Errors are `{"error": reason}`."""
        limit = self._settings.max_ticket_bytes
        try:
            with anyio.fail_after(self._settings.read_timeout):
                body = await read_all(request.stream(), limit)
            ticket = msgspec.json.decode(body, type=Ticket)
        except TooLarge:
            return _error(HTTPStatus.BAD_REQUEST, f"the ticket exceeds {limit} bytes")
        except (TimeoutError, ClientDisconnect):
            return _error(HTTPStatus.BAD_REQUEST, "the ticket did not arrive")
        except msgspec.DecodeError as error:
            return _error(HTTPStatus.BAD_REQUEST, f"not a ticket: {error}")
        try:
            exchange, client_request, index = self._exchanges.find(ticket.request_id)
        except LookupError:
            return _error(HTTPStatus.NOT_FOUND, "no request waits under this request_id")

        failure: PrefillFailure | None = None
        with exchange.prefill() as scope:

            def decode_left() -> None:
                log.warning(
                    "request %s, prompt %d: decode engine %s gave its ticket up: cancelling the prefill",
                    exchange.request_id,
                    index,
                    ticket.remote_engine_id,
                )
                scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(when_disconnected, request.receive, decode_left)
                failure = await self._run(exchange, client_request, index, body)
                tasks.cancel_scope.cancel()
        if scope.cancelled_caught:
            return _error(HTTPStatus.GONE, "the client's request has ended")
        if failure is None:
            return JSONResponse({"status": "ok"})
        log.warning(
            "request %s, prompt %d, decode engine %s: prefill failed: %s: the decode engine is told%s",
            exchange.request_id,
            index,
            ticket.remote_engine_id,
            failure.reason,
            " and ends its own answer" if exchange.answering else ", the client gets the error",
        )
        if not exchange.answering:
            exchange.end(failure.answer)
        return _error(HTTPStatus.BAD_GATEWAY, failure.reason)

    async def _run(
        self, exchange: Exchange, request: ClientRequest, index: int, ticket: bytes
    ) -> PrefillFailure | None:
        try:
            async with self._prefill.open(
                "POST",
                request.endpoint.value,
                headers=exchange.prefill_headers,
                content=prefill_body(request, index, ticket),
                request_id=exchange.request_id,
            ) as answer:
                body = await read_all(answer.aiter_bytes(), _MAX_PREFILL_ANSWER_BYTES)
        except EngineError as error:
            return PrefillFailure.because(str(error))
        except TooLarge:
            return PrefillFailure.because(f"the prefill engine's answer exceeds {_MAX_PREFILL_ANSWER_BYTES} bytes")
        return _judge(answer.status_code, answer.headers.get("content-type"), body)


def _judge(status: int, content_type: str | None, body: bytes) -> PrefillFailure | None:
    """P refuses a bad request (4xx) in words meant for the client; a failed transfer comes with HTTP 200."""
    if 400 <= status < 500:
        reason = f"HTTP {status} from the prefill engine"
        return PrefillFailure(reason, Response(body, status_code=status, media_type=content_type))
    if not 200 <= status < 300:
        return PrefillFailure.because(f"HTTP {status} from the prefill engine: {_excerpt(body)}")
    try:
        result = msgspec.json.decode(body, type=_PrefillAnswer).kv_transfer_params
    except msgspec.DecodeError as error:
        return PrefillFailure.because(f"the prefill engine's answer is no completion: {error}")
    return PrefillFailure.because(result.error) if result is not None and result.error is not None else None


def _excerpt(body: bytes) -> str:
    return body[:500].decode(errors="replace")


def _error(status: HTTPStatus, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=status.value)
