# SPDX-License-Identifier: Apache-2.0
"""Answers are named after the client's request id, on all routes. `test_kinds_of_requests.py` compares the answers
themselves with a single engine's, and `test_usage.py` what they count."""

import re
from typing import Any

import httpx
import pytest

from harness.client import Client
from harness.clusters import TP2_TO_TP1, Cluster
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference

pytestmark = [
    pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def conversation(about: str, stream: bool) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Which layer comes before layer 7 of {about}, {stream}? " * 12}]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/messages"]
)
def test_answers_are_named_after_the_clients_request_id(
    cluster: Cluster, client: Client, reference: Reference, path: str, stream: bool
) -> None:
    if path.endswith("/batch") and stream:
        pytest.skip("vLLM has no streams there")
    body: dict[str, Any] = {"model": client.model, "max_tokens": 4, "stream": stream}
    body |= {"prompt": "layer by layer"} if path == "/v1/completions" else {"messages": conversation("names", stream)}
    if path.endswith("/batch"):
        body["messages"] = [body["messages"]]
    headers = {"X-Request-Id": "abc", "X-Who-Computes": "prefill"}
    answer = client.http.post(path, json=body, headers=headers)
    alone = httpx.post(
        f"{reference.engine.url}{path}",
        json={**body, "model": str(cluster.model)},
        headers=headers,
        timeout=120,
        **PLAIN_HTTP,
    )
    assert (answer.status_code, alone.status_code) == (200, 200)
    assert answer.headers["x-request-id"] == "abc"
    assert names_in(answer) == names_in(alone)
    assert names_in(answer)


def names_in(answer: httpx.Response) -> set[str]:
    return set(re.findall(r'"id": ?"([^"]*)"', answer.text))
