# SPDX-License-Identifier: Apache-2.0
"""Spans of KV transfers, where vLLM has tracing on: in the trace that a request's headers name, beside vLLM's own."""

import time
from typing import TYPE_CHECKING

from vllm.tracing import extract_trace_context

from vllm_ascend_pd.core.text import one_line

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_REASON_CHARS = 300

REQUEST_ID = "gen_ai.request.id"
TOKENS = "kv_pd.tokens"
CACHED_TOKENS = "kv_pd.cached_tokens"
DECODE_ENGINE = "kv_pd.decode_engine"
RECEIVED_BYTES = "kv_pd.received_bytes"
EARLY_BYTES = "kv_pd.bytes_before_prefill_end"


class TransferSpan:
    """Begins when it is made. vLLM keeps a request's trace headers only where tracing is on: without them nothing is
    recorded. Ending it puts it into a queue; another thread sends it."""

    def __init__(self, name: str, request: "Request") -> None:
        self._name = name
        self._headers = request.trace_headers
        self._begun_ns = time.time_ns()

    def end(self, attributes: dict[str, str | int], error: str | None = None, reason: str = "") -> None:
        """`error`: how it failed, in a word. Neither it nor `reason` may quote what a client or another engine said of
        a prompt."""
        if not self._headers:
            return
        context = extract_trace_context(self._headers)
        if context is None:  # OpenTelemetry is not installed
            return
        from opentelemetry import trace

        if not trace.get_current_span(context).get_span_context().is_valid:
            return  # it would be a trace of its own
        # The provider is vLLM's, which it has made for this process.
        span = trace.get_tracer("vllm_ascend_pd").start_span(
            self._name, context, attributes=attributes, start_time=self._begun_ns
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, one_line(reason or error, _MAX_REASON_CHARS)))
        span.end()
