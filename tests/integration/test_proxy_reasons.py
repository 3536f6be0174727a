# SPDX-License-Identifier: Apache-2.0
"""vLLM answers a failed request with "Internal server error" only. If decode reports no reason either, the client gets
what the proxy can tell from the tickets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from engine_standin import INTERNAL_ERROR, event, make_failure, make_layerwise_ticket, make_ticket
from proxy_cluster import COMPLETION, Cluster, counted, eventually, running_cluster

from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH


@pytest.mark.usefixtures("no_reason_comes")
@pytest.mark.parametrize("ticket_of", [lambda name: make_ticket(name, "t"), make_layerwise_ticket])
def test_reason_when_decode_gave_up_waiting(cluster: Cluster, ticket_of: Callable[[str], dict[str, Any]]) -> None:
    """It closes the connection of its ticket, which may have no id, and fails the request later."""
    cluster.decode.needs_prefill = False
    cluster.decode.fails = True
    cluster.decode.waits = 1.0
    cluster.prefill.hangs = True
    answer = cluster.send_only("/v1/completions", COMPLETION)
    assert cluster.decode.working.wait(5)
    ticket = ticket_of(f"cmpl-{cluster.decode.received[0].headers['x-request-id']}-0")
    post = cluster.send_only(METASERVER_PATH, ticket)
    assert cluster.prefill.working.wait(5)
    post.close()
    response = answer.getresponse()
    assert response.status == 500
    assert json.loads(response.read())["error"]["message"] == "decode engine: it gave up waiting for prefill"


@pytest.mark.usefixtures("no_reason_comes")
def test_error_that_vllm_itself_cannot_read_names_no_reason() -> None:
    """/v1/messages is built on a chat's stream, and parses its error as a token."""
    said = (
        "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, ...]\nchoices ..."
    )
    with running_cluster() as cluster:
        cluster.decode.first_events = [
            {"type": "message_start", "message": {"id": "m"}},
            {"type": "error", "error": {"type": "internal_error", "message": said}},
        ]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}
        response = cluster.client.post("/v1/messages", json=body)
        assert response.status_code == 500
        request_id = cluster.decode.received[0].headers["x-request-id"]
        message = f"decode engine: it failed without a reason: see its log, request {request_id}"
        assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("attempts", "failures"), [(1, {"no prefill engine": 2}), (2, {"transfer failed": 1, "no prefill engine": 1})]
)
def test_stream_of_a_response_that_is_broken_off(attempts: int, failures: dict[str, int]) -> None:
    """vLLM sends no event when generation fails there. Decode has reported the reason and is not at fault."""
    with running_cluster(attempts=attempts, eject_after=1) as cluster:
        cluster.decode.first_events = [{"type": "response.created"}, {"type": "response.in_progress"}]
        cluster.decode.breaks_off = True
        cluster.decode.explains = "prefill rank 0 went silent"
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 8, "stream": True}
        response = cluster.client.post("/v1/responses", json=body)
        assert response.status_code == 503
        assert "prefill rank 0 went silent" in response.json()["error"]["message"]
        assert counted(cluster)[1]["decode"] == failures
        (decode,) = (role for role in cluster.client.get("/status.json").json()["roles"] if role["role"] == "decode")
        assert [engine["state"] for engine in decode["engines"]] == ["healthy"]


def test_a_failure_after_tokens_is_passed_on_as_it_is_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), running_cluster() as cluster:
        cluster.decode.needs_prefill = False
        cluster.decode.fails_after_first_token = True
        token, error, done = cluster.complete(stream=True).text.strip().split("\n\n")
        assert "text" in token
        assert error == event(INTERNAL_ERROR).decode().strip()
        assert done == "data: [DONE]"
        eventually(lambda: counted(cluster)[1]["decode"] == {"server error": 1})
    [line] = [record.getMessage() for record in caplog.records if "the client gets" in record.getMessage()]
    assert "Internal server error" in line
    assert line.endswith(": the client gets 500")


def test_a_reported_failure_is_the_clients_reason_and_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), running_cluster(attempts=1) as cluster:
        cluster.prefill.hangs = True
        answer = cluster.send_only("/v1/completions", COMPLETION)
        assert cluster.prefill.working.wait(10)
        failure = make_failure(cluster.decode.tickets[0], "went\nsilent")
        assert cluster.client.post(METASERVER_PATH + FAILURE_SUFFIX, json=failure).status_code == 200
        response = answer.getresponse()
        assert response.status == 502
        assert json.loads(response.read())["error"]["message"] == "KV transfer failed: went silent"
        request_id = cluster.decode.received[0].headers["x-request-id"]
    [line] = [record.getMessage() for record in caplog.records if "went silent" in record.getMessage()]
    assert line == f"request {request_id}: decode at {cluster.decode_url} failed: went silent: the client gets 502"


def test_a_failure_that_ends_no_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Prefill has answered, and decode computes the prompt itself."""
    with caplog.at_level("INFO"), running_cluster() as cluster:
        cluster.decode.recomputes = True
        cluster.decode.waits = 2.0
        answer = cluster.send_only("/v1/completions", COMPLETION)
        eventually(lambda: cluster.decode.metaserver_answers)
        failure = make_failure(cluster.decode.tickets[0], "went silent")
        assert cluster.client.post(METASERVER_PATH + FAILURE_SUFFIX, json=failure).status_code == 200
        assert answer.getresponse().status == 200
        request_id = cluster.decode.received[0].headers["x-request-id"]
    [line] = [record.getMessage() for record in caplog.records if "went silent" in record.getMessage()]
    said = f"decode engine {cluster.decode_url} reports a failed transfer and continues without it: went silent"
    assert line == f"request {request_id}, prompt 0: {said}"


FORGED = "oops\n2026-11-24 00:00:00,000 INFO vllm_ascend_pd.proxy.rendezvous.client_endpoint: all is well \x1b[31m"


@pytest.mark.parametrize("of", ["decode", "prefill", "prefill's transfer"])
def test_an_engines_error_is_one_log_line(of: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), running_cluster(attempts=1) as cluster:
        if of == "prefill's transfer":
            cluster.prefill.transfer_error = FORGED
        else:
            (cluster.decode if of == "decode" else cluster.prefill).raw_refusal = FORGED
        assert cluster.complete().status_code >= 500
    said = [record.getMessage() for record in caplog.records if "all is well" in record.getMessage()]
    assert said
    assert all(message.isprintable() for message in said)
