# SPDX-License-Identifier: Apache-2.0
"""Each of vLLM's routes through the proxy: what decode and prefill get of a request, and which of them is asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_standin import OTHER_PATHS, Received, limit_of, make_ticket
from proxy_cluster import CHAT, COMPLETION, Cluster

from vllm_ascend_pd.core.protocol import METASERVER_PATH

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_completion_tokens": 8, "seed": 1},
    "/v1/responses": {
        "model": "tiny",
        "input": "hi",
        "instructions": "Be brief.",
        "max_output_tokens": 64,
        "tools": [{"type": "function", "name": "look", "parameters": {}, "strict": False}],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
    },
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 64, "system": "Be brief.", "top_k": 1},
    "/inference/v1/generate": {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 64, "temperature": 0.0, "min_tokens": 9, "logprobs": 2},
    },
}
SHAPES_THE_PROMPT = {
    *("prompt", "messages", "input", "instructions", "system", "tools", "tool_choice", "token_ids", "model"),
    *("chat_template_kwargs", "mm_processor_kwargs"),
}
TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=opaque,other=1",
}

routes = pytest.mark.parametrize(("path", "body"), BODIES.items(), ids=BODIES)


@routes
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_prompts_of_every_route_go_to_prefill(cluster: Cluster, path: str, body: dict[str, Any], stream: bool) -> None:
    response = cluster.client.post(path, json={**body, "stream": stream})
    assert response.status_code == 200
    [at_decode] = cluster.decode.received
    if stream:
        assert response.content == cluster.decode.expected_stream(at_decode)
    prompts = len(body["messages"]) if path.endswith("/batch") else 1
    assert cluster.decode.metaserver_answers == prompts * [(200, {"status": "ok"})]
    assert len(cluster.prefill.received) == prompts
    for received in cluster.prefill.received:
        assert received.path == path
        assert received.body["stream"] is False
        assert limit_of(received) == 1
        assert received.headers["x-request-id"] == at_decode.headers["x-request-id"]
        _same_prompt(path, at_decode, received)
    sent = {name: value for name, value in at_decode.body.items() if name != "kv_transfer_params"}
    sent.pop("request_id", None)
    assert sent == {**body, "stream": stream}


def _same_prompt(path: str, at_decode: Received, at_prefill: Received) -> None:
    for name in SHAPES_THE_PROMPT & at_decode.body.keys():
        whole = at_decode.body[name]
        assert at_prefill.body[name] == (whole[:1] if path.endswith("/batch") and name == "messages" else whole)


def test_prefill_gets_no_fields_that_it_does_not_need(cluster: Cluster) -> None:
    for path in ("/v1/responses", "/inference/v1/generate"):
        assert cluster.client.post(path, json=BODIES[path]).status_code == 200
    response, generate = (received.body for received in cluster.prefill.received)
    assert response["store"] is False
    assert not {"include", "top_logprobs", "background"} & response.keys()
    assert response["request_id"].startswith("resp_")
    assert generate["sampling_params"] == {"max_tokens": 1, "min_tokens": 1, "n": 1, "temperature": 0.0}


@routes
def test_headers_go_to_both(cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    sent = {**TRACE, "Authorization": "Bearer secret", "X-Request-Id": "mine", "anthropic-version": "2023-06-01"}
    response = cluster.client.post(path, json=body, headers=sent)
    assert response.headers.get_list("x-request-id") == ["mine"]
    for received in (*cluster.decode.received, *cluster.prefill.received):
        assert {name: received.headers[name] for name in TRACE} == TRACE
        assert received.headers["authorization"] == "Bearer secret"
        assert received.headers["anthropic-version"] == "2023-06-01"
        assert received.headers["x-request-id"] != "mine"


@routes
def test_kv_transfer_params_of_clients_are_refused(idle_cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    refused = idle_cluster.client.post(path, json={**body, "kv_transfer_params": {"do_remote_prefill": True}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")


def test_responses_that_need_one_engine(cluster: Cluster) -> None:
    body = BODIES["/v1/responses"]
    one_engine = {"previous_response_id": "resp_1", "background": True, "request_id": "resp_mine", "truncation": "auto"}
    for field, value in one_engine.items():
        refused = cluster.client.post("/v1/responses", json={**body, field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert cluster.decode.received == []
    accepted = {**body, "previous_response_id": None, "background": False, "truncation": "disabled"}
    assert cluster.client.post("/v1/responses", json=accepted).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/images/generations"),
        ("GET", "/health/"),  # no redirect, which would go to the host that the client names
    ],
)
def test_routes_that_are_not_served_say_so_once(idle_cluster: Cluster, method: str, path: str) -> None:
    """In OpenAI's form, and with a status that OpenAI's SDKs do not retry."""
    refused = idle_cluster.client.request(method, path, content=b"anything")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (404, 404, "NotFoundError")
    assert "this proxy does not serve" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", METASERVER_PATH, "/admin/engines"])
def test_a_path_with_a_newline_behind_it_is_no_route(idle_cluster: Cluster, path: str) -> None:
    """Decode would get the request without the newline, and compute its prompt."""
    refused = idle_cluster.client.post(f"{path}%0A", json=COMPLETION)
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")
    assert idle_cluster.client.get("/v1/models%0A").status_code == 404
    assert idle_cluster.decode.received == []


def test_a_method_that_a_route_does_not_take(idle_cluster: Cluster) -> None:
    refused = idle_cluster.client.get("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    said = "Method Not Allowed: this proxy does not serve GET /v1/chat/completions"
    assert refused.json()["error"] == {"message": said, "type": "MethodNotAllowedError", "param": None, "code": 405}


def test_routes_that_decode_answers_alone(cluster: Cluster) -> None:
    body = b'{"model": "tiny",  "prompt": "\\u0061", "messages": [{"role": "user", "content": 1.50}]}'
    for number, path in enumerate(OTHER_PATHS):
        method, content = ("GET", b"") if path == "/version" else ("POST", body)
        response = cluster.client.request(method, path, content=content, headers=TRACE)
        assert (response.status_code, response.content) == (200, content or b"{}"), path
        [received] = cluster.decode.received[number:]
        assert {name: received.headers[name] for name in TRACE} == TRACE
    assert cluster.prefill.received == []


def test_what_is_refused_on_routes_that_decode_answers_alone(idle_cluster: Cluster) -> None:
    refused = idle_cluster.client.post(
        "/tokenize", json={"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")
    for path in ("/abort_requests", "/sleep", "/v1/load_lora_adapter", "/reset_prefix_cache", "/collective_rpc"):
        assert idle_cluster.client.post(path, json={}).status_code == 404, "an operator's, not a client's"


@pytest.mark.usefixtures("no_reason_comes")
@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("/v1/responses", {"type": "response.created", "response": {"id": "resp_1"}}),
        ("/v1/messages", {"type": "message_start", "message": {"id": "m"}}),
    ],
)
def test_a_stream_that_has_only_begun_can_still_fail_with_a_status(
    cluster: Cluster, path: str, first: dict[str, Any]
) -> None:
    cluster.decode.first_events = [first]
    cluster.decode.fails = True
    response = cluster.client.post(path, json={**BODIES[path], "stream": True})
    assert response.status_code == 500
    assert "it failed without a reason" in response.json()["error"]["message"]


def test_a_broken_stream_of_messages_says_so_in_its_own_way(cluster: Cluster) -> None:
    """Anthropic's clients ignore events without a name."""
    cluster.decode.dies_after_first_token = True
    response = cluster.client.post("/v1/messages", json={**BODIES["/v1/messages"], "stream": True})
    *_, last = response.text.strip().split("\n\n")
    name, data = last.splitlines()
    assert name == "event: error"
    said = json.loads(data.removeprefix("data: "))
    assert (said["type"], said["error"]["type"]) == ("error", "BadGatewayError")
    assert "decode engine" in said["error"]["message"]


def test_a_second_turn_of_a_response_has_no_ticket(cluster: Cluster) -> None:
    """Only decode has the answer of a built-in tool."""
    cluster.decode.needs_prefill = False
    cluster.decode.hangs_after_first_token = True
    with cluster.client.stream("POST", "/v1/responses", json={**BODIES["/v1/responses"], "stream": True}) as response:
        events = response.iter_raw()
        next(events)
        request_id = cluster.decode.received[0].body["request_id"]
        for turn, status in ((1, 404), (0, 200)):
            ticket = make_ticket(f"{request_id}_{turn}", "t")
            assert cluster.client.post("/v1/metaserver", json=ticket).status_code == status
