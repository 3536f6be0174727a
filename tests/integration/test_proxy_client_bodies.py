# SPDX-License-Identifier: Apache-2.0
"""Invalid bodies of clients: none that only an engine reads passes the proxy's checks."""

from __future__ import annotations

import pytest
from engine_standin import NO_OBJECT
from proxy_cluster import Cluster

DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
# Python's `json`, with which engines read, accepts these and finds the field that is not the client's.
HIDDEN = (
    b"\xef\xbb\xbf" + b'{"prompt": "a", "kv_transfer_params": {}}',
    '{"prompt": "a", "kv_transfer_params": {}}'.encode("utf-16"),
    b'{"prompt": "a", "temperature": NaN, "kv_transfer_params": {}}',
    b'{"prompt": "\\ud800", "\\u006bv_transfer_params": {}}',
)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b'{"prompt": }', b"null", b"\xff\xfe", *HIDDEN, DEEP], ids=range(12)
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_is_not_a_json_object_is_refused(idle_cluster: Cluster, path: str, body: bytes) -> None:
    response = idle_cluster.client.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the request body is not a JSON object: ")
    assert idle_cluster.decode.received == []


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
