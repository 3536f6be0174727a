# SPDX-License-Identifier: Apache-2.0
"""Spans of KV transfers, in the trace that a request's headers name. vLLM's tracing must be on."""

import time
from typing import TYPE_CHECKING

from vllm.tracing import extract_trace_context

from vllm_ascend_pd.core.text import one_line

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_REASON_CHARS = 300


class TransferSpan:
    """A span that begins when it is made. Ending it puts it into a queue, and another thread sends it.

    Nothing is recorded for a request without trace headers. vLLM keeps these only if tracing is on.
    """

    def __init__(self, name: str, request: "Request") -> None:
        self._name = name
        self._headers = request.trace_headers
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
