# SPDX-License-Identifier: Apache-2.0
"""One trace has the proxy's spans of a request, vLLM's of both engines, and those of the transfer between them."""

import itertools
import secrets
import time

import pytest
from test_retry import TWO_OF_EACH

from harness.client import Client, random_prompt
from harness.clusters import POISONED_TOKENS, Cluster
from harness.collector import Span
from harness.documented import documented, is_part_of
from harness.engines import Engine

CLIENT = "00f067aa0ba902b7"
ROUTE = "POST /v1/completions"
TRANSFER = {"kv_push", "kv_receive"}

pytestmark = [
    # One of test_retry's.
    pytest.mark.parametrize("cluster", [TWO_OF_EACH], ids=str, indirect=True),
    pytest.mark.timeout(900),
]


def new_trace(client: Client) -> str:
    """The id of a trace to which all further requests belong."""
    trace = secrets.token_hex(16)
    client.http.headers["traceparent"] = f"00-{trace}-{CLIENT}-01"
    return trace


def collected(cluster: Cluster, trace: str) -> list[Span]:
    """A trace once it is whole: each attempt of the proxy's at an engine has the engine's transfer below it and, if it
    came to its end, vLLM's own span."""
    assert cluster.collector is not None

    def is_whole(spans: list[Span]) -> bool:
        attempts = [span for span in spans if span.name in ("decode", "prefill")]
        served = {span.id for span in attempts if not (span.failed or span.events)}
        moved = sorted(span.parent for span in spans if span.name in TRANSFER)
        answered = {span.parent for span in spans if span.name == "llm_request"}
        ended = any(span.name == ROUTE for span in spans)
        return ended and sorted(span.id for span in attempts) == moved and served <= answered

    return cluster.collector.wait(is_whole, trace)


def of(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def runs_in(span: Span, engine: Engine) -> bool:
    return int(str(span.process["vllm.process_id"])) in engine.process.members()


def test_engines_and_proxy_are_told_as_documented(cluster: Cluster) -> None:
    assert cluster.collector is not None
    values = {"http://collector.example:4317": cluster.collector.url}
    engine, proxy = (
        documented("docs/metrics.md", "vllm serve MODEL ...", values),
        documented("docs/metrics.md", "vllm-ascend-pd proxy ...", values),
    )
    assert all(is_part_of(engine, each.process.command) for each in (*cluster.prefill, *cluster.decode))
    assert is_part_of(proxy, cluster.proxy.process.command)


def test_a_request_is_one_trace(cluster: Cluster, client: Client) -> None:
    trace = new_trace(client)
    completion = client.complete("whisper " * 40, max_tokens=64)
    spans = collected(cluster, trace)
    [request], [decode], [prefill] = of(spans, ROUTE), of(spans, "decode"), of(spans, "prefill")
    assert (request.parent, decode.parent, prefill.parent) == (CLIENT, request.id, decode.id)
    [push], [receive] = of(spans, "kv_push"), of(spans, "kv_receive")
    assert (push.parent, receive.parent) == (prefill.id, decode.id)
    [at_decode] = [span for span in of(spans, "llm_request") if span.parent == decode.id]
    [at_prefill] = [span for span in of(spans, "llm_request") if span.parent == prefill.id]
    [asked] = [engine for engine in cluster.prefill if engine.url == prefill.attributes["kv_pd.engine"]]
    assert all(runs_in(span, asked) for span in (push, at_prefill))
    [answered] = [engine for engine in cluster.decode if engine.url == decode.attributes["kv_pd.engine"]]
    assert all(runs_in(span, answered) for span in (receive, at_decode))
    assert not any(span.failed for span in spans)
    assert completion.kv_transfer_params is not None
    assert receive.attributes["kv_pd.received_bytes"] == completion.kv_transfer_params["received_bytes"]
    assert receive.attributes["gen_ai.request.id"] == push.attributes["gen_ai.request.id"]
    assert str(decode.attributes["gen_ai.request.id"]) in str(push.attributes["gen_ai.request.id"])
    # The ranks of one machine: all clocks are the same.
    assert decode.begun < receive.begun < prefill.begun < push.begun < receive.ended < decode.ended
    assert cluster.collector is not None
    assert b"whisper" not in cluster.collector.raw


def test_what_failed_is_in_the_trace_beside_what_followed(cluster: Cluster, client: Client) -> None:
    deadline = time.monotonic() + 60
    for number in itertools.count():  # until one comes to the engine that fails, which is passed over for a while
        trace = new_trace(client)
        client.complete(random_prompt(POISONED_TOKENS, f"traced-{number}"))
        spans = collected(cluster, trace)
        if len(of(spans, "prefill")) > 1 or time.monotonic() > deadline:
            break
    failed, served = of(spans, "prefill")
    assert failed.attributes["kv_pd.engine"] == cluster.prefill[0].url
    assert served.attributes["kv_pd.engine"] == cluster.prefill[1].url
    [request], [*_, decode] = of(spans, ROUTE), of(spans, "decode")
    # Under the same ticket, or as a new request: whatever was known first.
    assert [name for span in (request, of(spans, "decode")[0]) for name, _ in span.events].count("retry") == 1
    pushes = {span.parent: span for span in of(spans, "kv_push")}
    assert pushes[failed.id].failed
    assert "poisoned by the test" in pushes[failed.id].reason
    assert not pushes[served.id].failed
    [receive] = [span for span in of(spans, "kv_receive") if span.parent == decode.id]
    assert not any(span.failed for span in (request, decode, receive))
