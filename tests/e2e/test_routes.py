# SPDX-License-Identifier: Apache-2.0
"""Routes of vLLM beside completions and chats: real engines answer as a single one does, after a prefill elsewhere."""

import json
import re
from typing import Any

import httpx
import pytest

from harness.client import Client
from harness.clusters import TP2_TO_TP1, Cluster
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference
from harness.usage import usages_in
from harness.waiting import wait_until

pytestmark = [
    pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def conversation(about: str, stream: bool) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Which layer comes before layer 7 of {about}, {stream}? " * 12}]


BODIES: dict[str, Any] = {
    "/v1/responses": lambda stream: {
        "input": conversation("responses", stream),
        "instructions": "Answer in one word.",
        "max_output_tokens": 12,
        "ignore_eos": True,
        "stream": stream,
    },
    "/v1/messages": lambda stream: {
        "messages": conversation("messages", stream),
        "system": "Answer in one word.",
        "max_tokens": 12,
        "stream": stream,
    },
    "/v1/chat/completions/batch": lambda stream: {
        "messages": [conversation("a batch", stream), conversation("the same batch", stream)],
        "max_tokens": 12,
        "ignore_eos": True,
    },
}


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/responses", False),
        ("/v1/responses", True),
        ("/v1/messages", False),
        ("/v1/messages", True),
        ("/v1/chat/completions/batch", False),
    ],
)
def test_answers(cluster: Cluster, client: Client, reference: Reference, path: str, stream: bool) -> None:
    body = {"model": client.model, "temperature": 0, **BODIES[path](stream)}
    received = "vllm:kv_pd_ticket_to_ready_seconds_count"
    before = cluster.decode[0].metric(received)
    answer = client.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    expected = httpx.post(
        f"{reference.engine.url}{path}", json={**body, "model": str(cluster.model)}, timeout=120, **PLAIN_HTTP
    )
    assert texts(answer) == texts(expected)
    assert texts(answer)
    assert usages_in(answer) == usages_in(expected)
    prompts = len(body["messages"]) if path.endswith("/batch") else 1
    # Not what prefill counts: an answer that ends at once may cut off prefill's.
    wait_until(lambda: cluster.decode[0].metric(received) == before + prompts, 30)


def texts(answer: httpx.Response) -> list[str]:
    """What was generated, of all choices; of a stream the pieces put together."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        assert not [event for event in events if event.get("error")], answer.text
        deltas = [event["delta"] for event in events if event.get("delta")]
        return ["".join(each if isinstance(each, str) else each.get("text", "") for each in deltas)]
    body = answer.json()
    if "choices" in body:
        return [choice["message"]["content"] for choice in body["choices"]]
    if "output" in body:
        return [part["text"] for item in body["output"] for part in item["content"]]
    return [part["text"] for part in body["content"]]


def test_tokenizing(cluster: Cluster, client: Client, reference: Reference) -> None:
    for path, body in {
        "/tokenize": {"prompt": "layer by layer"},
        "/detokenize": {"tokens": [50, 60, 70]},
        "/v1/messages/count_tokens": {"messages": conversation("counting", False)},
    }.items():
        answer = client.http.post(path, json={"model": client.model, **body})
        expected = httpx.post(f"{reference.engine.url}{path}", json={"model": client.model, **body}, **PLAIN_HTTP)
        assert (answer.status_code, answer.json()) == (200, expected.json())


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
