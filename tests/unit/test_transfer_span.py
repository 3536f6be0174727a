# SPDX-License-Identifier: Apache-2.0
"""The spans of transfers, with OpenTelemetry's own provider. tests/e2e/test_traces.py has whole traces of engines."""

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from harness.tickets import ticket_with
from vllm_ascend_pd.connector import metrics as spans_module
from vllm_ascend_pd.connector.metrics import PushSpans, ReceiveSpans
from vllm_ascend_pd.core.observer import PushBegun, PushEnded, PushRefused, ReceiveEnded, TicketIssued
from vllm_ascend_pd.core.protocol import MAX_FAILURE_CHARS
from vllm_ascend_pd.core.reasons import ReceiveFailure

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
TICKET = ticket_with(request_id="cmpl-1-0", remote_engine_id="decode-0", remote_cached_tokens=4, num_tokens=10)


@pytest.fixture(scope="session")
def exporter() -> InMemorySpanExporter:
    """Of the process's provider, which can be set once: in an engine it is vLLM's."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def the(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    [span] = spans.get_finished_spans()
    assert span.name == name
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.start_time <= span.end_time
    return span


def test_a_push_that_fails(spans: InMemorySpanExporter) -> None:
    pushes = PushSpans()
    pushes.on(PushBegun("r", HEADERS))
    pushes.on(PushEnded("r", TICKET, "a lease ran out"))
    span = the(spans, "kv_push")
    assert dict(span.attributes) == {
        "gen_ai.request.id": "cmpl-1-0",
        "kv_pd.decode_engine": "decode-0",
        "kv_pd.tokens": 6,
        "kv_pd.cached_tokens": 4,
        "error.type": "not_delivered",
    }
    assert span.status.description == "a lease ran out"


def test_a_ticket_that_cannot_be_served(spans: InMemorySpanExporter) -> None:
    pushes = PushSpans()
    pushes.on(PushBegun("r", HEADERS))
    pushes.on(PushRefused("r", "remote_port is -1"))
    span = the(spans, "kv_push")
    assert dict(span.attributes) == {"error.type": "ticket"}
    assert span.status.description == "remote_port is -1"


def ended(cause: ReceiveFailure, failure: str) -> ReceiveEnded:
    return ReceiveEnded("r", TICKET, seconds=1.0, received_bytes=0, early_bytes=0, cause=cause, failure=failure)


def test_a_receive_that_fails(spans: InMemorySpanExporter) -> None:
    receives = ReceiveSpans()
    receives.on(TicketIssued("r", TICKET, HEADERS, 1))
    receives.on(ended(ReceiveFailure.TRANSFER, "prefill rank 0: " + MAX_FAILURE_CHARS * "x"))
    span = the(spans, "kv_receive")
    assert span.attributes["error.type"] == "transfer"
    assert span.status.description.startswith("prefill rank 0: xxx")
    assert len(span.status.description) < 400


def test_why_prefill_failed_is_not_quoted(spans: InMemorySpanExporter) -> None:
    """It may have come from an engine that quotes the prompt."""
    receives = ReceiveSpans()
    receives.on(TicketIssued("r", TICKET, HEADERS, 1))
    receives.on(ended(ReceiveFailure.PREFILL, "the prompt 'a secret' is too long"))
    span = the(spans, "kv_receive")
    assert span.attributes["error.type"] == span.status.description == "prefill"


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "a=1"}, {"traceparent": "00-zz"}])
def test_without_a_trace_there_is_no_span(headers: object, spans: InMemorySpanExporter) -> None:
    pushes = PushSpans()
    pushes.on(PushBegun("r", headers))
    pushes.on(PushEnded("r", TICKET, "write"))
    assert not spans.get_finished_spans()


def test_what_is_not_sampled_is_not_recorded(spans: InMemorySpanExporter) -> None:
    pushes = PushSpans()
    pushes.on(PushBegun("r", {"traceparent": f"00-{TRACE}-{PARENT}-00"}))
    pushes.on(PushEnded("r", TICKET, None))
    assert not spans.get_finished_spans()


def test_attributes_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("\n## Traces\n")[2]
    prefixes = ("kv_pd.", "gen_ai.", "error.")
    names = {value for value in vars(spans_module).values() if isinstance(value, str) and value.startswith(prefixes)}
    assert len(names) > 3
    assert not {name for name in names if f"`{name}`" not in text}
