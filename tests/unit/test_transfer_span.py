# SPDX-License-Identifier: Apache-2.0
"""The spans that schedulers record of transfers, with OpenTelemetry's own provider and vLLM's requests."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from harness.schedulers import decode_scheduler, prefill_scheduler
from harness.scheduling import Scheduled, make_output, make_request
from vllm_ascend_pd.connector import metrics as spans_module
from vllm_ascend_pd.connector.metrics import PushSpans, ReceiveSpans, TransferSpan
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.protocol import MAX_FAILURE_CHARS
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.decode.metaserver import MetaserverClient, MetaserverSettings
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.tickets import EngineInfo
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BLOCK, PROMPT, CACHED = 4, 10, 4
BLOCKS = ([7, 1, 5],)
TICKET = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "request_id": "cmpl-1-0",
    "remote_block_ids": [[3, 4, 5]],
    "remote_block_size": [BLOCK],
    "remote_engine_id": "decode-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5555,
    "remote_tp_size": 1,
    "remote_cached_tokens": CACHED,
    "ticket_id": 32 * "0",
    "num_tokens": PROMPT,
}
PUSH = {
    "gen_ai.request.id": "cmpl-1-0",
    "kv_pd.decode_engine": "decode-0",
    "kv_pd.tokens": PROMPT - CACHED,
    "kv_pd.cached_tokens": CACHED,
}
NOWHERE = "http://127.0.0.1:9/v1/metaserver"


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


@pytest.fixture
def prefill() -> PrefillScheduler:
    return prefill_scheduler([TokenGroup(BLOCK)], observer=PushSpans())


@pytest.fixture
def decode() -> Iterator[DecodeScheduler]:
    client = MetaserverClient(MetaserverSettings(retries=0), own_host="127.0.0.1")
    engine = EngineInfo("decode-0", "10.0.0.1", 5555, 1)
    scheduler = decode_scheduler(engine, [TokenGroup(BLOCK)], client, observer=ReceiveSpans())
    yield scheduler
    scheduler.close()


def request(params: object, headers: object = HEADERS):
    made = make_request("r", PROMPT, params)
    made.trace_headers = headers
    return made


def the(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    [span] = spans.get_finished_spans()
    assert span.name == name
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.start_time <= span.end_time
    return span


def pushed(prefill: PrefillScheduler, asked, tokens: int = PROMPT) -> None:
    """Scheduled once, for `tokens` of the prompt, and ended."""
    prefill.allocated(asked, BLOCKS)
    prefill.build_step(make_output(new=[Scheduled(asked, BLOCKS, 0, tokens)]))
    prefill.finished(asked)


def test_a_push_that_fails_after_its_request_has_ended(prefill: PrefillScheduler, spans: InMemorySpanExporter) -> None:
    pushed(prefill, request(TICKET))
    prefill.update(WorkerReport(failed={"r": "a lease ran out"}), set())
    prefill.update(WorkerReport(failed={"r": "and so on"}), {"r"})
    span = the(spans, "kv_push")
    assert dict(span.attributes) == {**PUSH, "error.type": "not_delivered"}
    assert span.status.description == "a lease ran out"


def test_a_ticket_that_cannot_be_served(prefill: PrefillScheduler, spans: InMemorySpanExporter) -> None:
    prefill.allocated(request({**TICKET, "remote_port": -1}), BLOCKS)
    span = the(spans, "kv_push")
    assert dict(span.attributes) == {"error.type": "ticket"}
    assert "remote_port" in span.status.description


def issued(decode: DecodeScheduler, asked) -> str:
    """Its ticket's id."""
    decode.allocated(asked, BLOCKS, PROMPT - CACHED)
    [expected] = decode.build_step({"other": 1}).expects
    return expected.ticket_id


def test_a_receive_that_fails(decode: DecodeScheduler, spans: InMemorySpanExporter) -> None:
    ticket_id = issued(decode, request({"do_remote_prefill": True, "metaserver": NOWHERE}))
    decode.update(WorkerReport(failed={ticket_id: "prefill rank 0: " + MAX_FAILURE_CHARS * "x"}), {"r"})
    span = the(spans, "kv_receive")
    assert span.attributes["error.type"] == "transfer"
    assert span.status.description.startswith("prefill rank 0: xxx")
    assert len(span.status.description) < 400


def test_why_prefill_failed_is_not_quoted(decode: DecodeScheduler, spans: InMemorySpanExporter) -> None:
    """It may have come from an engine that quotes the prompt."""
    asked = request({"do_remote_prefill": True, "metaserver": NOWHERE})
    issued(decode, asked)
    for _ in range(2000):
        if decode.build_step({}).cancelled:
            break
        time.sleep(0.005)
    decode.update(None, {"r"})
    span = the(spans, "kv_receive")
    assert span.attributes["error.type"] == span.status.description == "prefill"


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "a=1"}, {"traceparent": "00-zz"}])
def test_without_a_trace_there_is_no_span(headers: object, spans: InMemorySpanExporter) -> None:
    TransferSpan("kv_push", headers).end({}, "write")
    assert not spans.get_finished_spans()


def test_what_is_not_sampled_is_not_recorded(spans: InMemorySpanExporter) -> None:
    TransferSpan("kv_push", {"traceparent": f"00-{TRACE}-{PARENT}-00"}).end({})
    assert not spans.get_finished_spans()


def test_attributes_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("\n## Traces\n")[2]
    prefixes = ("kv_pd.", "gen_ai.", "error.")
    names = {value for value in vars(spans_module).values() if isinstance(value, str) and value.startswith(prefixes)}
    assert len(names) > 3
    assert not {name for name in names if f"`{name}`" not in text}
