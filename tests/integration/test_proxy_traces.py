# SPDX-License-Identifier: Apache-2.0
"""The proxy's spans of requests, at a real OTLP receiver, and the trace context that engines get."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from engine_standin import DecodeEngine, PrefillEngine, Servers
from proxy_cluster import CHAT, COMPLETION, STREAM, Cluster, beside, command, running_cluster

from harness.collector import Collector, Span
from harness.plain_http import PLAIN_HTTP
from vllm_ascend_pd.proxy.operate.tracing import check_tracing

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CLIENT}-01"
ROUTE = "POST /v1/completions"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with Collector() as collector:
        yield collector


def ended(*names: str) -> object:
    return lambda spans: sorted(span.name for span in spans) == sorted(names)


def by_name(spans: list[Span]) -> dict[str, Span]:
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


def parent_in(headers: dict[str, str]) -> str:
    """Returns the parent span in the headers that an engine got."""
    version, trace, span, flags = headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    return span


def ask(cluster: Cluster, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", **(headers or {})}
    return cluster.client.post("/v1/completions", json={**COMPLETION, **fields}, headers=headers)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_one_trace_of_proxy_and_engines(collector: Collector, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    url = collector.url if protocol == "grpc" else collector.http_url
    with running_cluster(otlp_traces_endpoint=url) as cluster:
        before = time.time_ns()
        assert ask(cluster, {"x-request-id": "mine", "authorization": "Bearer s3cret"}, **STREAM).status_code == 200
        spans = by_name(collector.wait(ended(ROUTE, "decode", "prefill")))
        after = time.time_ns()
        request, decode, prefill = spans[ROUTE], spans["decode"], spans["prefill"]
        assert {span.trace for span in spans.values()} == {TRACE}
        assert (request.parent, decode.parent, prefill.parent) == (CLIENT, request.id, decode.id)
        assert before < request.begun < decode.begun < prefill.begun < prefill.ended < decode.ended <= request.ended
        assert request.ended < after
        assert not any(span.failed for span in spans.values())
        [at_decode], [at_prefill] = cluster.decode.received, cluster.prefill.received
        assert parent_in(at_decode.headers) == decode.id
        assert parent_in(at_prefill.headers) == prefill.id
        assert at_decode.headers["tracestate"] == at_prefill.headers["tracestate"] == "vendor=1"
        assert request.process["service.name"] == "vllm-ascend-pd-proxy"
        first_token = request.attributes.pop("gen_ai.latency.time_to_first_token")
        assert isinstance(first_token, float)
        assert 0 < first_token < (after - before) / 1e9
        assert request.attributes == {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "gen_ai.request.id": "mine",
        }
        internal_id = at_decode.headers["x-request-id"]
        assert decode.attributes.pop("kv_pd.computed_by") == "prefill"
        assert decode.attributes == {"gen_ai.request.id": internal_id, "kv_pd.engine": cluster.decode_url}
        assert prefill.attributes == {
            "gen_ai.request.id": internal_id,
            "kv_pd.engine": cluster.prefill_url,
            "kv_pd.prompt": 0,
        }
    assert b"vendor=1" in collector.raw
    for secret in (b"s3cret", b"quick brown fox", "ÿ".encode()):
        assert secret not in collector.raw


def test_a_prefill_for_each_prompt(collector: Collector) -> None:
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        assert ask(cluster, prompt=["a", "b"]).status_code == 200
        spans = collector.wait(ended(ROUTE, "decode", "prefill", "prefill"))
        assert {span.attributes["kv_pd.prompt"] for span in spans if span.name == "prefill"} == {0, 1}
        told = {parent_in(received.headers) for received in cluster.prefill.received}
        assert told == {span.id for span in spans if span.name == "prefill"}


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-zz"}, {"traceparent": f"00-{'0' * 32}-{CLIENT}-01"}])
def test_without_a_valid_context_the_proxy_begins_a_trace(collector: Collector, headers: dict[str, str]) -> None:
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        assert cluster.client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
        spans = by_name(collector.wait(lambda spans: len(spans) == 3))
        request = spans["POST /v1/chat/completions"]
        assert request.parent == ""
        assert {span.trace for span in spans.values()} == {request.trace}
        assert cluster.decode.received[0].headers["traceparent"].split("-")[1] == request.trace


def test_who_computed_the_prompt(collector: Collector) -> None:
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        cluster.decode.computes_itself = True
        assert ask(cluster, {"X-Who-Computes": "decode"}).status_code == 200
        decode = by_name(collector.wait(ended(ROUTE, "decode")))["decode"]
        assert (decode.attributes["kv_pd.who_computes"], decode.attributes["kv_pd.computed_by"]) == ("decode", "decode")
        assert "kv_pd.without_prefill" not in decode.attributes


def test_decode_was_told_that_no_prefill_engine_is_well(collector: Collector) -> None:
    with running_cluster(only_prefill=("http://127.0.0.1:9",), otlp_traces_endpoint=collector.url) as cluster:
        cluster.decode.computes_itself = True
        assert ask(cluster, {}).status_code == 200
        spans = [span for span in collector.wait(ended(ROUTE, "decode", "prefill", "decode")) if span.name == "decode"]
        first, second = sorted(spans, key=lambda span: span.begun)
        assert first.attributes["error.type"] == "no_prefill_engine"
        assert (second.attributes["kv_pd.without_prefill"], second.attributes["kv_pd.computed_by"]) == (True, "decode")


def test_two_trace_contexts_count_as_none(collector: Collector) -> None:
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        headers = [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT), ("tracestate", "a=1")]
        assert cluster.client.get("/v1/models", headers=headers).status_code == 200
        spans = by_name(collector.wait(ended("GET /v1/models", "decode")))
        assert spans["GET /v1/models"].parent == ""
        received = cluster.decode.received[0].headers
        assert spans["decode"].id in received["traceparent"]
        assert "tracestate" not in received


def test_a_client_that_does_not_sample_is_not_traced(collector: Collector) -> None:
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        assert ask(cluster, {"traceparent": TRACEPARENT[:-2] + "00"}).status_code == 200
        assert ask(cluster, {"traceparent": "none"}).status_code == 200
        collector.wait(ended(ROUTE, "decode", "prefill"))
        assert not collector.spans(TRACE)
        [told, _] = [received.headers["traceparent"].split("-") for received in cluster.prefill.received]
        assert (told[1], told[3]) == (TRACE, "00")


def test_without_an_endpoint_engines_get_the_clients_context() -> None:
    with running_cluster() as cluster:
        assert ask(cluster).status_code == 200
        for engine in (cluster.decode, cluster.prefill):
            [received] = engine.received
            assert (received.headers["traceparent"], received.headers["tracestate"]) == (TRACEPARENT, "vendor=1")


def test_a_request_is_sent_to_decode_again_after_a_prefill(collector: Collector) -> None:
    failing = PrefillEngine()
    failing.refusal = (500, {"error": "while reading 'the quick brown fox'"})
    with beside(prefill=failing, otlp_traces_endpoint=collector.url, strategy="round-robin") as cluster:
        assert ask(cluster).status_code == 200
        spans = collector.wait(ended(ROUTE, "decode", "prefill", "decode", "prefill"))
        request, *decodes = [span for span in spans if span.name != "prefill"]
        assert [span.failed for span in decodes] == [True, False]
        assert decodes[0].attributes["error.type"] == "transfer_failed"
        assert "HTTP 500" in decodes[0].reason
        first, second = [span for span in spans if span.name == "prefill"]
        assert [first.parent, second.parent] == [span.id for span in decodes]
        assert (first.attributes["error.type"], second.failed) == ("server_error", False)
        told = [parent_in(engine.received[0].headers) for engine in (failing, cluster.prefill)]
        assert told == [first.id, second.id]
        assert [name for name, _ in request.events] == ["retry"]
    assert b"quick brown fox" not in collector.raw


def test_decode_is_tried_again(collector: Collector) -> None:
    failing = DecodeEngine()
    failing.breaks_off = True
    with beside(decode=failing, otlp_traces_endpoint=collector.url, strategy="round-robin") as cluster:
        assert ask(cluster, **STREAM).status_code == 200
        spans = collector.wait(ended(ROUTE, "decode", "prefill", "decode", "prefill"))
        request, *decodes = [span for span in spans if span.name != "prefill"]
        assert [span.parent for span in decodes] == [request.id, request.id]
        assert [span.failed for span in decodes] == [True, False]
        assert decodes[0].attributes["error.type"] == "connection_lost"
        assert [span.parent for span in spans if span.name == "prefill"] == [span.id for span in decodes]
        assert not request.failed
        retry = {"error.type": "connection_lost", "kv_pd.engine": cluster.decode_url}
        assert request.events == (("retry", retry),)


def test_an_engine_that_is_passed_over(collector: Collector) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with running_cluster(other_prefill=(gone,), otlp_traces_endpoint=collector.url, strategy="round-robin") as cluster:
        assert ask(cluster).status_code == 200
        prefill = by_name(collector.wait(ended(ROUTE, "decode", "prefill")))["prefill"]
        assert prefill.attributes["kv_pd.engine"] == cluster.prefill_url
        assert prefill.attributes["kv_pd.unreachable_engines"] == [gone]


def test_a_client_that_leaves(collector: Collector) -> None:
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        cluster.prefill.hangs = True
        leaving = cluster.send_only("/v1/completions", COMPLETION)
        assert cluster.prefill.working.wait(10)
        leaving.close()
        spans = by_name(collector.wait(ended(ROUTE, "decode", "prefill")))
        assert spans[ROUTE].attributes["error.type"] == "client_left"
        assert "http.response.status_code" not in spans[ROUTE].attributes
        assert spans["decode"].events == spans["prefill"].events == (("cancelled", {}),)
        assert not spans["decode"].failed


def test_a_stream_that_breaks_off(collector: Collector) -> None:
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        cluster.decode.dies_after_first_token = True
        assert "error" in ask(cluster, **STREAM).text
        spans = by_name(collector.wait(ended(ROUTE, "decode", "prefill")))
        for span in (spans[ROUTE], spans["decode"]):
            assert span.attributes["error.type"] == "connection_lost"
        assert spans[ROUTE].attributes["http.response.status_code"] == 200


def test_a_refused_request(collector: Collector) -> None:
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        body = {"prompt": "the quick brown fox", "kv_transfer_params": {}}  # which is the proxy's own
        assert cluster.client.post("/v1/completions", json=body).status_code == 400
        [request] = collector.wait(ended(ROUTE))
        assert request.attributes["http.response.status_code"] == 400
        assert not request.failed
    assert b"quick" not in collector.raw


def test_requests_are_served_whatever_the_collector_does(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    """The queue of spans is bounded. The spans of later requests arrive once the collector takes them."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector.refuses = True
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        assert all(ask(cluster).status_code == 200 for _ in range(20))
        collector.refuses = False
        assert ask(cluster).status_code == 200
        collector.wait(lambda spans: len(spans) >= 3)


def test_a_proxy_that_stops_sends_its_remaining_spans(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with running_cluster(otlp_traces_endpoint=collector.url) as cluster:
        assert ask(cluster).status_code == 200
        assert not collector.spans()
    collector.wait(ended(ROUTE, "decode", "prefill"))


@pytest.mark.parametrize("collects", [False, True], ids=["refuses", "hangs"])
def test_a_process_ends_in_time_whatever_the_collector_does(collects: bool) -> None:
    prefill, decode = PrefillEngine(), DecodeEngine()
    with Servers() as servers, socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if not collects:
            silent.close()
        engines = [
            *("--prefill", servers.start(lambda _: prefill.app)),
            *("--decode", servers.start(lambda _: decode.app)),
        ]
        process = subprocess.Popen(
            command("--port", "0", *engines, "--otlp-traces-endpoint", endpoint),
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OTEL_BSP_SCHEDULE_DELAY": "50"},
        )
        try:
            assert process.stderr is not None
            port = process.stderr.readline().partition(" port ")[2].partition(";")[0]
            url = f"http://127.0.0.1:{port}/v1/completions"
            assert httpx.post(url, json=COMPLETION, timeout=30, **PLAIN_HTTP).status_code == 200
            if not collects:
                assert any("Failed to export traces" in line or "UNAVAILABLE" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=8)
        finally:
            process.kill()
        assert process.returncode == 0
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("endpoint", "protocol", "reason"),
    [
        ("127.0.0.1:4318", "http/protobuf", "not a URL"),
        ("", "grpc", "not a URL"),
        ("nonsense", "grpc", "not a URL"),
        ("ftp://127.0.0.1:4317", "grpc", "not a URL"),
        ("http://127.0.0.1:4317", "json", "it must be grpc or http/protobuf"),
        ("http://me:s3cret@127.0.0.1:4317", "grpc", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("me:s3cret@127.0.0.1:4318", "http/protobuf", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_a_wrong_endpoint_is_refused(
    endpoint: str, protocol: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(ValueError, match=reason) as raised:
        check_tracing(endpoint)
    assert "s3cret" not in str(raised.value)


def test_missing_packages_are_named_in_one_clear_line(tmp_path: object) -> None:
    """The environment has no OpenTelemetry: an empty folder of that name is first on the path."""
    package = tmp_path / "opentelemetry"  # type: ignore[operator]
    package.mkdir()
    (package / "__init__.py").write_text("")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    options = ("--port", "0", "--prefill", "http://p:1", "--decode", "http://d:1")
    run = subprocess.run(
        command(*options, "--otlp-traces-endpoint", "http://127.0.0.1:4317"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp" in line


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded() -> None:
    code = "import sys, vllm_ascend_pd.proxy.app; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
