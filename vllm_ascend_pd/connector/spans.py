# SPDX-License-Identifier: Apache-2.0
"""Spans of KV transfers, in the trace that a request's headers name. vLLM's tracing must be on."""

import time
from collections.abc import Mapping

from vllm.tracing import extract_trace_context

from vllm_ascend_pd.core.observer import DecodeSchedulerObserver, PrefillSchedulerObserver, ReceiveEnding
from vllm_ascend_pd.core.reasons import PushFailure, ReceiveFailure
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.ticket import Ticket

# Attributes. docs/metrics.md explains them.
REQUEST_ID = "gen_ai.request.id"
TOKENS = "kv_pd.tokens"
CACHED_TOKENS = "kv_pd.cached_tokens"
DECODE_ENGINE = "kv_pd.decode_engine"
RECEIVED_BYTES = "kv_pd.received_bytes"
EARLY_BYTES = "kv_pd.bytes_before_prefill_end"

_MAX_REASON_CHARS = 300


class TransferSpan:
    """A span that begins when it is made. Ending it puts it into a queue, and another thread sends it.

    Nothing is recorded without a request's trace headers. vLLM keeps these only if tracing is on.
    """

    def __init__(self, name: str, headers: Mapping[str, str] | None) -> None:
        self._name = name
        self._headers = headers
        self._begun_ns = time.time_ns()

    def end(self, attributes: dict[str, str | int], error: str | None = None, reason: str = "") -> None:
        """Ends the span. `error`: how the transfer failed, in a word; None: it did not.

        Neither `error` nor `reason` may quote a client's or another engine's words about a prompt.
        """
        if not self._headers:
            return
        context = extract_trace_context(self._headers)
        if context is None:  # OpenTelemetry is not installed
            return
        from opentelemetry import trace

        if not trace.get_current_span(context).get_span_context().is_valid:
            return  # the span would begin a trace of its own
        # vLLM has made the provider for this process.
        span = trace.get_tracer("vllm_ascend_pd").start_span(
            self._name, context, attributes=attributes, start_time=self._begun_ns
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, one_line(reason or error, _MAX_REASON_CHARS)))
        span.end()


class PushSpans(PrefillSchedulerObserver):
    """A span `kv_push` for each transfer of a prefill engine."""

    def __init__(self) -> None:
        self._spans: dict[str, TransferSpan] = {}  # by request id, of transfers that have not ended

    def transfer_began(self, request_id: str, trace_headers: Mapping[str, str] | None) -> None:
        if trace_headers:
            self._spans[request_id] = TransferSpan("kv_push", trace_headers)

    def ticket_refused(self, request_id: str, reason: str) -> None:
        if span := self._spans.pop(request_id, None):
            span.end({}, PushFailure.TICKET.value, reason)

    def transfer_ended(self, request_id: str, ticket: Ticket, failure: str | None) -> None:
        if (span := self._spans.pop(request_id, None)) is None:
            return
        attributes: dict[str, str | int] = {
            REQUEST_ID: ticket.request_id,
            DECODE_ENGINE: ticket.remote_engine_id,
            TOKENS: ticket.num_tokens - ticket.remote_cached_tokens,
            CACHED_TOKENS: ticket.remote_cached_tokens,
        }
        span.end(attributes, None if failure is None else "not_delivered", failure or "")


class ReceiveSpans(DecodeSchedulerObserver):
    """A span `kv_receive` for each ticket of a decode engine."""

    def __init__(self) -> None:
        self._spans: dict[str, TransferSpan] = {}  # by request id, of tickets that have not ended

    def ticket_issued(self, request_id: str, ticket: Ticket, trace_headers: Mapping[str, str] | None) -> None:
        if trace_headers:
            self._spans[request_id] = TransferSpan("kv_receive", trace_headers)

    def transfer_ended(self, request_id: str, ending: ReceiveEnding) -> None:
        if (span := self._spans.pop(request_id, None)) is None:
            return
        ticket, cause = ending.ticket, ending.cause
        attributes: dict[str, str | int] = {
            REQUEST_ID: ticket.request_id,
            TOKENS: ticket.num_tokens - ticket.remote_cached_tokens,
            RECEIVED_BYTES: ending.received_bytes,
            EARLY_BYTES: ending.early_bytes,
        }
        # The reason of a failed prefill is the metaserver's text, which may quote an engine's error about a prompt.
        reason = "" if cause is ReceiveFailure.PREFILL else ending.failure
        span.end(attributes, None if cause is None else cause.value, reason)
