# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of engines with vllm-ascend's `MooncakeLayerwiseConnector`, as far as HTTP goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_standin import make_layerwise_ticket
from layerwise_engines import LayerwiseDecodeEngine, LayerwisePrefillEngine
from proxy_cluster import CHAT, COMPLETION, STREAM, Cluster, running_cluster

from vllm_ascend_pd.proxy.rendezvous import client_endpoint


@contextmanager
def layerwise_cluster(**settings: Any) -> Iterator[Cluster]:
    decode = LayerwiseDecodeEngine()
    with running_cluster(decode_engine=decode, prefill_engine=LayerwisePrefillEngine(decode), **settings) as cluster:
        yield cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with layerwise_cluster() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [
        ("/v1/completions", COMPLETION, {}),
        ("/v1/completions", COMPLETION, STREAM),
        ("/v1/chat/completions", CHAT, {}),
    ],
    ids=["json", "stream", "chat"],
)
def test_a_request(cluster: Cluster, path: str, body: dict[str, Any], stream: dict[str, Any]) -> None:
    response = cluster.client.post(path, json={**body, **stream})
    assert response.status_code == 200
    (at_decode,), (at_prefill,) = cluster.decode.received, cluster.prefill.received
    if stream:
        assert response.content == cluster.decode.expected_stream(at_decode)
    else:
        assert response.json()["choices"] == [{"index": 0, "text": "ÿ 0"}]
    request_id = at_decode.headers["x-request-id"]
    assert at_prefill.headers["x-request-id"] == request_id
    own = f"cmpl-{request_id}-0" if path == "/v1/completions" else f"chatcmpl-{request_id}"
    assert at_prefill.body["kv_transfer_params"] == make_layerwise_ticket(own), "as it came"
    assert (at_prefill.body["min_tokens"], at_prefill.body["stream"]) == (1, False)
    assert cluster.decode.metaserver_answers == [(200, {"status": "ok"})]


@pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])
def test_a_prefill_that_fails_ends_the_request(cluster: Cluster, stream: dict[str, Any]) -> None:
    """Decode would wait for its KV without end; the proxy ends the request."""
    cluster.prefill.refusal = (500, {"error": {"message": "out of blocks"}})
    response = cluster.complete(**stream)
    assert response.status_code == 502
    assert "prefill failed: HTTP 500" in response.json()["error"]["message"]
    assert cluster.decode.cancelled.wait(5), "decode goes on waiting, and keeps its blocks"
    assert len(cluster.prefill.received) == 1, "its decode side cannot tell a second attempt's KV from the first's"


def test_a_silent_prefill() -> None:
    with layerwise_cluster(read_timeout=0.3, check_interval=0.05) as cluster:
        cluster.prefill.hangs = True
        cluster.prefill.metrics = "vllm:prompt_tokens_total 7\n"
        response = cluster.complete()
        assert response.status_code == 502
        said = "prefill engine: its metrics show no new token for 0.3 s"
        assert said in response.json()["error"]["message"]
        assert cluster.prefill.cancelled.wait(5)
        assert cluster.decode.cancelled.wait(5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETION, "prompt": ["one", "two"]}),
        ("/v1/chat/completions", {**CHAT, "n": 2}),
    ],
    ids=["two-prompts", "two-samples"],
)
def test_requests_of_several_prompts_or_samples_are_refused(cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    response = cluster.client.post(path, json=body)
    assert response.status_code == 400
    assert "one prompt and one sample" in response.json()["error"]["message"]
    assert cluster.decode.cancelled.wait(5)
    assert cluster.client.post(path, json={**body, "n": 1, **_one_prompt(path)}).status_code == 200


def _one_prompt(path: str) -> dict[str, Any]:
    return {"prompt": ["one"]} if path == "/v1/completions" else {}


@pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])
def test_decode_that_fails_after_its_ticket_was_answered(cluster: Cluster, stream: dict[str, Any]) -> None:
    """Its tickets have no id, and it never reports a reason: the proxy waits for none."""
    cluster.decode.fails = True
    begun = time.monotonic()
    response = cluster.complete(**stream)
    assert time.monotonic() - begun < client_endpoint._REASON_SECONDS
    assert response.status_code == 500
    request_id = cluster.decode.received[0].headers["x-request-id"]
    message = f"decode engine: it failed without a reason: see its log, request {request_id}"
    assert response.json()["error"]["message"] == message
