# SPDX-License-Identifier: Apache-2.0
"""The metaserver's route for failures: a decode engine reports that a ticket's KV did not come, or will not."""

from __future__ import annotations

import logging
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vllm_ascend_pd.core.metaserver import MAX_REASON_CHARS, TransferFailure
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.errors import error_response
from vllm_ascend_pd.proxy.rendezvous.decode_attempt import DecodeAttempt, TicketProgress
from vllm_ascend_pd.proxy.rendezvous.post_reader import PostReader, PostRefused, error_answer
from vllm_ascend_pd.proxy.rendezvous.prefill_answer import bad_gateway, failed
from vllm_ascend_pd.proxy.rendezvous.prefill_requests import PrefillRequests
from vllm_ascend_pd.proxy.rendezvous.request_table import TicketMatch
from vllm_ascend_pd.proxy.routing.answers import Failure, FailureKind

log = logging.getLogger(__name__)

_MAX_FAILURE_BYTES = 64 * 1024


class FailurePosts:
    """Serves decode's reports of failed transfers."""

    def __init__(self, reader: PostReader, prefill_requests: PrefillRequests) -> None:
        self._reader = reader
        self._prefill_requests = prefill_requests

    async def post_failure(self, request: Request) -> Response:
        """Ends the ticket's prefill. If the client has got nothing yet, a new decode attempt may follow.

        A failure without a ticket's id is the whole request's: it gets no ticket, or no further one.

        200, 400, 401, 404 and 503: as for a ticket.
        """
        try:
            report = await self._reader.read(request, _MAX_FAILURE_BYTES, _read_failure, "failure")
            match = self._reader.find(report.request_id)
        except PostRefused as refused:
            return refused.answer
        if not report.ticket_id:
            _refused(match.attempt, one_line(report.reason, MAX_REASON_CHARS), report.is_unfit)
            return JSONResponse({"status": "ok"})
        progress = match.attempt.tickets.get((match.prompt, report.ticket_id))
        if progress is None:
            return error_answer(HTTPStatus.NOT_FOUND, "no such ticket was posted for this request_id")
        self._handle(match, progress, one_line(report.reason, MAX_REASON_CHARS))
        return JSONResponse({"status": "ok"})

    def _handle(self, match: TicketMatch, progress: TicketProgress, reason: str) -> None:
        proxied, attempt, _, prompt, _ = match
        call = progress.call
        in_flight = self._prefill_requests.in_flight(call)
        if call.engines and not progress.given_up:
            proxied.prefill_failed(progress, failed(FailureKind.TRANSFER, reason, call.engine))
        progress.give_up()
        used_up = self._prefill_requests.used_up(progress)
        attempt.note_transfer_failure(_transfer_failure(reason, attempt, used_up), progress)
        begin_anew = in_flight and attempt.may_begin_anew and not used_up
        attempt_ends = begin_anew or not (attempt.answering or progress.recomputes)
        if attempt_ends:
            proxied.begin_anew(attempt, prompt, progress)
        if in_flight:
            call.cut_short(FailureKind.TRANSFER, f"decode reported: {reason}")
        elif not attempt_ends:  # otherwise the next attempt logs it
            log.warning(
                "request %s, prompt %d: decode engine %s reports a failed transfer and continues without it: %s",
                attempt.request_id,
                prompt,
                attempt.engine,
                reason,
            )


def _read_failure(body: bytes) -> TransferFailure:
    return msgspec.json.decode(body, type=TransferFailure)


def _refused(attempt: DecodeAttempt, reason: str, is_unfit: bool) -> None:
    """The decode engine ends the request, because prefill cannot be asked for what it lacks.

    `is_unfit`: whether every other decode engine would do the same.
    """
    log.warning("request %s: decode engine %s ends it: %s", attempt.request_id, attempt.engine, reason)
    if is_unfit:
        failure = Failure(FailureKind.REFUSED, reason, attempt.engine, error_response(HTTPStatus.BAD_REQUEST, reason))
    else:
        failure = _transfer_failure(reason, attempt, used_up=False)
    attempt.note_transfer_failure(failure)
    if not attempt.answering:
        attempt.end()


def _transfer_failure(reason: str, attempt: DecodeAttempt, used_up: bool) -> Failure:
    """The failure of an attempt whose KV did not come. `used_up`: no other attempt may follow, at decode either."""
    kind = FailureKind.PREFILL if used_up else FailureKind.TRANSFER
    return Failure(kind, reason, attempt.engine, bad_gateway(f"KV transfer failed: {reason}"))
