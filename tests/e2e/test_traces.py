# SPDX-License-Identifier: Apache-2.0
"""One trace has vLLM's spans of a request on both engines, and those of the transfer between them."""

import itertools
import secrets
import time

import pytest
from test_retry import TWO_OF_EACH, retries

from harness.client import Client, random_prompt
from harness.clusters import POISONED_TOKENS, Cluster
from harness.collector import Span
from harness.documented import documented, is_part_of
from harness.engines import Engine
from harness.pool import Reference

CLIENT = "00f067aa0ba902b7"
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


def collected(cluster: Cluster, trace: str, attempts: int) -> list[Span]:
    """A trace once both sides of all attempts at a transfer, and vLLM on one engine of each role, have sent theirs."""
    assert cluster.collector is not None

    def is_whole(spans: list[Span]) -> bool:
        return all(len(of(spans, name)) >= attempts for name in TRANSFER) and len(of(spans, "llm_request")) >= 2

    return cluster.collector.wait(is_whole, trace)


def of(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def runs_in(span: Span, engine: Engine) -> bool:
    return int(str(span.process["vllm.process_id"])) in engine.process.members()


def test_engines_are_told_as_documented(cluster: Cluster) -> None:
    assert cluster.collector is not None
    values = {"http://collector.example:4317": cluster.collector.url}
    engine = documented("docs/metrics.md", "vllm serve MODEL ...", values)
    assert all(is_part_of(engine, each.process.command) for each in (*cluster.prefill, *cluster.decode))


def test_a_request_is_one_trace(cluster: Cluster, client: Client) -> None:
    trace = new_trace(client)
    completion = client.complete("whisper " * 40, max_tokens=64)
    spans = collected(cluster, trace, attempts=1)
    assert {span.parent for span in spans} == {CLIENT}
    [push], [receive] = of(spans, "kv_push"), of(spans, "kv_receive")
    vllms = of(spans, "llm_request")
    for side, span in ((cluster.prefill, push), (cluster.decode, receive)):
        [engine] = [engine for engine in side if runs_in(span, engine)]
        assert [runs_in(each, engine) for each in vllms].count(True) == 1
    assert not any(span.failed for span in spans)
    assert completion.kv_transfer_params is not None
    assert receive.attributes["kv_pd.received_bytes"] == completion.kv_transfer_params["received_bytes"]
    assert receive.attributes["gen_ai.request.id"] == push.attributes["gen_ai.request.id"]
    # The ranks of one machine: all clocks are the same.
    assert receive.begun < push.begun < receive.ended
    assert cluster.collector is not None
    assert b"whisper" not in cluster.collector.raw


def test_what_failed_is_in_the_trace_beside_what_followed(
    cluster: Cluster, client: Client, reference: Reference
) -> None:
    """Every write of such a prompt fails in the first engine. A request that comes to it, which is passed over for a
    while, has a second attempt, and the client a single engine's tokens."""
    deadline = time.monotonic() + 60
    for number in itertools.count():
        before = retries(cluster)
        trace = new_trace(client)
        prompt = random_prompt(POISONED_TOKENS, f"traced-{number}")
        assert client.complete(prompt, stream=bool(number % 2)).token_ids == reference.complete(prompt)
        if (retried := retries(cluster) != before) or time.monotonic() > deadline:
            break
    assert retried
    spans = collected(cluster, trace, attempts=2)
    failed, served = of(spans, "kv_push")
    assert runs_in(failed, cluster.prefill[0])
    assert failed.failed
    assert "poisoned by the test" in failed.reason
    assert runs_in(served, cluster.prefill[1])
    assert not served.failed
    *_, receive = of(spans, "kv_receive")
    assert not receive.failed
