# SPDX-License-Identifier: Apache-2.0
"""Writes what happens to requests on decode, in the scheduler and in each rank, if `trace_dir` is set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import DecodeObserver, DecodeSchedulerObserver
from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.events import Mark, MarkEvent, fingerprint, short_name
from vllm_ascend_pd.observe.prefill_trace import process_of
from vllm_ascend_pd.observe.trace_file import TraceFile

if TYPE_CHECKING:
    from vllm_ascend_pd.core.observer import ReceiveEnding
    from vllm_ascend_pd.core.protocol import WriterId
    from vllm_ascend_pd.core.rank_info import RankInfo
    from vllm_ascend_pd.core.ticket import Ticket


class RequestMarks:
    """Marks what happens to requests in a row of a trace file."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._lane = file.lane("requests")

    def mark(self, what: str, request_id: str, ticket_id: str, writer: WriterId | None = None) -> None:
        """Marks that `what` of `observe/events.py` happens now. `writer`: the prefill rank concerned, if any."""
        about = "" if writer is None else short_name(f"{writer.pp_rank}/{writer.rank} of {writer.engine_id}")
        self._put(what, Mark(short_name(request_id), fingerprint(ticket_id), about))

    def placed(self, request_id: str, about: str) -> None:
        """It is decided now who computes a request's prompt."""
        self._put(events.PLACED, Mark(short_name(request_id), "", about))

    def _put(self, what: str, args: Mark) -> None:
        self._file.put(MarkEvent(name=what, ph="i", ts=time.monotonic() * 1e6, tid=self._lane, args=args))


class DecodeTrace(DecodeObserver):
    """Traces a decode rank."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._marks = RequestMarks(file)

    def ticket_received(self, request_id: str, ticket_id: str) -> None:
        self._marks.mark(events.EXPECTED, request_id, ticket_id)

    def grant_sent(self, request_id: str, ticket_id: str, writer: WriterId) -> None:
        self._marks.mark(events.GRANTED, request_id, ticket_id, writer)

    def report_received(self, request_id: str, ticket_id: str, writer: WriterId) -> None:
        self._marks.mark(events.REPORTED, request_id, ticket_id, writer)

    def ticket_ended(self, request_id: str, ticket_id: str, received: bool) -> None:
        self._marks.mark(events.RECEIVED if received else events.FAILED, request_id, ticket_id)

    def close(self, timeout_s: float) -> None:
        self._file.close(timeout_s)


class DecodeSchedulerTrace(DecodeSchedulerObserver):
    """Traces the scheduler's side of a decode engine."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._marks = RequestMarks(file)

    def prompt_placed(self, request_id: str, by_decode: bool, reason: str, tokens: int) -> None:
        self._marks.placed(request_id, f"{'decode' if by_decode else 'prefill'}: {reason}, {tokens} tokens")

    def ticket_issued(self, request_id: str, ticket: Ticket, trace_headers: Mapping[str, str] | None) -> None:
        self._marks.mark(events.ISSUED, ticket.request_id, ticket.ticket_id)

    def transfer_ended(self, request_id: str, ending: ReceiveEnding) -> None:
        what = events.READY if ending.cause is None else events.FAILED
        self._marks.mark(what, ending.ticket.request_id, ending.ticket.ticket_id)

    def close(self, timeout_s: float) -> None:
        self._file.close(timeout_s)


def rank_trace(config: ConnectorConfig, rank_info: RankInfo) -> DecodeTrace | None:
    """Returns the trace of a decode rank, None if traces are off. Raises TraceError if it cannot be written."""
    if config.trace_dir is None:
        return None
    process = process_of("decode rank", rank_info.engine_id, rank_info.pp_rank, rank_info.rank)
    return DecodeTrace(TraceFile(config.trace_dir, process, config.trace_max_bytes))


def scheduler_trace(config: ConnectorConfig, engine_id: str) -> DecodeSchedulerTrace | None:
    """Returns the trace of decode's scheduler, None if traces are off. Raises TraceError if it cannot be written."""
    if config.trace_dir is None:
        return None
    process = process_of("decode scheduler", engine_id)
    return DecodeSchedulerTrace(TraceFile(config.trace_dir, process, config.trace_max_bytes))
