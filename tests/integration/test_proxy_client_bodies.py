# SPDX-License-Identifier: Apache-2.0
"""Invalid bodies of clients: decode answers them in its own words, and no JSON that only an engine accepts passes the
proxy's checks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from engine_standin import NO_OBJECT
from proxy_cluster import Cluster, running_cluster


@pytest.fixture(scope="module")
def idle_cluster() -> Iterator[Cluster]:
    """For tests whose requests no engine computes."""
    with running_cluster() as cluster:
        yield cluster


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b'{"prompt": }', b"null", b"\xff\xfe"])
def test_decode_answers_malformed_bodies(idle_cluster: Cluster, body: bytes) -> None:
    response = idle_cluster.client.post("/v1/completions", content=body)
    assert (response.status_code, response.json()) == (400, NO_OBJECT)


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + b'{"prompt": "a", "kv_transfer_params": {}}',
        '{"prompt": "a", "kv_transfer_params": {}}'.encode("utf-16"),
        b'{"prompt": "a", "temperature": NaN, "kv_transfer_params": {}}',
        b'{"temperature": NaN, "kv_transfer_params": 0}',
        b'{"prompt": "\\ud800", "\\u006bv_transfer_params": {}}',
    ],
)
def test_transfer_parameters_cannot_hide_in_json_that_only_python_accepts(cluster: Cluster, body: bytes) -> None:
    for path in ("/v1/completions", "/tokenize"):
        response = cluster.client.post(path, content=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params")
    assert cluster.decode.received == []


def test_json_that_engines_may_read_differently_is_refused(cluster: Cluster) -> None:
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    large = b'{"prompt": "a", "temperature": NaN, "user": "%s"}' % (b"a" * (1 << 20))
    digits = b'{"prompt": "a", "temperature": NaN, "user": %s}' % (b"1" * 5000)
    for body in (deep, large, digits):
        response = cluster.client.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("the request body is not a JSON object: ")
    assert cluster.decode.received == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_encodings_that_engines_read(cluster: Cluster, encoding: str) -> None:
    body = json.dumps({"prompt": "layer by layer", "max_tokens": 4}).encode(encoding)
    assert cluster.client.post("/v1/completions", content=body).status_code == 200
    assert len(cluster.prefill.received) == 1


def test_a_request_without_a_prompt_reaches_decode_as_it_came(cluster: Cluster) -> None:
    cluster.decode.refusal = (400, NO_OBJECT)
    for path, body in {
        "/v1/chat/completions": {"max_tokens": 4},
        "/v1/responses": {"model": "m"},
        "/v1/messages": {"messages": [], "max_tokens": 4},
        "/inference/v1/generate": {"token_ids": [1]},
    }.items():
        response = cluster.client.post(path, json=body)
        assert (response.status_code, response.json()) == (400, NO_OBJECT)
        assert cluster.decode.received[-1].body == body


@pytest.mark.parametrize("content_type", ["text/plain", "application/json; charset=utf-8", None])
def test_decode_gets_the_clients_content_type(cluster: Cluster, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    cluster.client.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 4}', headers=headers)
    assert cluster.decode.received[0].headers.get("content-type") == content_type
    assert cluster.prefill.received[0].headers["content-type"] == "application/json"
