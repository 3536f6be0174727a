# SPDX-License-Identifier: Apache-2.0
"""Decode engines that fail: which requests the proxy retries on another engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_standin import DecodeEngine, event, make_failure, make_ticket
from proxy_cluster import CHAT, STREAM, Cluster, beside, closing_server, counted, running_cluster

from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


def fail_inside(engine: DecodeEngine) -> None:
    engine.fails = True


def refuse_all(engine: DecodeEngine) -> None:
    engine.refusal = (503, {"error": {"message": "loading"}})


def break_off(engine: DecodeEngine) -> None:
    engine.breaks_off = True


def fail_after_the_role(engine: DecodeEngine) -> None:
    engine.first_events = [ROLE]
    engine.fails = True


def explain(engine: DecodeEngine) -> None:
    engine.fails = True
    engine.explains = "prefill rank 1 went silent"


@pytest.mark.parametrize(
    ("fault", "kind", "stream"),
    [
        (fail_inside, "server error", {}),
        (fail_inside, "server error", STREAM),
        (refuse_all, "server error", STREAM),
        (break_off, "connection lost", STREAM),
        (fail_after_the_role, "server error", STREAM),
        (explain, "transfer failed", {}),
        (explain, "transfer failed", STREAM),
    ],
)
def test_failed_decode_goes_to_another_engine(
    fault: Callable[[DecodeEngine], None], kind: str, stream: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if kind == "server error":
        request.getfixturevalue("no_reason_comes")
    failing = DecodeEngine()
    fault(failing)
    with beside(decode=failing) as cluster:
        response = cluster.client.post("/v1/chat/completions", json={**CHAT, **stream})
        assert response.status_code == 200
        (first,), (second,) = failing.received, cluster.decode.received
        assert first.body == second.body
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        assert response.headers["x-request-id"] == second.headers["x-request-id"]
        if stream:
            assert response.content == cluster.decode.expected_stream(second)
        if fault is break_off:
            assert len(cluster.prefill.received) == 2, "the next engine needs a prefill of its own"
        # Tickets of the first attempt match nothing any more.
        late = make_ticket(f"chatcmpl-{first.headers['x-request-id']}", "ticket-0")
        assert cluster.client.post(METASERVER_PATH, json=late).status_code == 404
        prefill = {kind: 1} if fault is explain else {}
        assert counted(cluster) == ({"prefill": 0, "decode": 1}, {"prefill": prefill, "decode": {kind: 1}})


def test_a_decode_engine_that_closes_the_connection_is_replaced() -> None:
    with closing_server() as (url, seen), running_cluster(other_decode=(url,)) as cluster:
        assert cluster.complete().status_code == 200
        assert len(seen) == 1
        assert counted(cluster)[1]["decode"] == {"connection lost": 1}


def test_prefills_of_a_failed_attempt_are_cancelled_first() -> None:
    """The first engine posts its ticket and dies."""
    dying = DecodeEngine()
    with beside(decode=dying) as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.hangs = True
        answer = client.submit(cluster.complete)
        assert cluster.prefill.working.wait(5)
        cluster.prefill.hangs = False
        failure = make_failure(dying.tickets[0], "registered memory is gone")
        assert cluster.client.post(METASERVER_PATH + FAILURE_SUFFIX, json=failure).status_code == 200
        assert answer.result().status_code == 200
        assert cluster.prefill.cancelled.is_set()
        assert dying.cancelled.wait(5)
        ids = [sent.headers["x-request-id"] for sent in cluster.prefill.received]
        assert ids == [dying.received[0].headers["x-request-id"], cluster.decode.received[0].headers["x-request-id"]]


def test_the_same_decode_engine_is_asked_again_if_the_other_cannot_be_reached() -> None:
    with closing_server() as (gone, _):
        pass
    with running_cluster(other_decode=(gone,)) as cluster:
        cluster.decode.fails = True
        cluster.decode.explains = "the lease ran out"
        assert cluster.complete().status_code == 503
        assert len(cluster.decode.received) == 3, "the last time to compute the prompt itself"


@pytest.mark.usefixtures("no_reason_comes")
def test_decode_attempts_are_bounded() -> None:
    failing = DecodeEngine()
    failing.fails = True
    for attempts, asked in ((1, 1), (2, 2), (5, 2)):
        with beside(decode=failing, attempts=attempts) as cluster:
            cluster.decode.fails = True
            failing.received.clear()
            assert cluster.complete(stream=True).status_code == 500
            assert len(failing.received) + len(cluster.decode.received) == asked


def test_no_retry_after_the_clients_first_token() -> None:
    dying = DecodeEngine()
    dying.dies_after_first_token = True
    with beside(decode=dying) as cluster:
        response = cluster.complete(stream=True)
        first, *_, last = response.text.strip().split("\n\n")
        assert "ÿ 0" in first
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 502
        assert "[DONE]" not in response.text
        assert cluster.decode.received == []


def test_big_first_events_pass(cluster: Cluster) -> None:
    cluster.decode.first_events = [ROLE, {"choices": [{"index": 0, "delta": {"content": "x" * 3_000_000}}]}]
    response = cluster.client.post("/v1/chat/completions", json={**CHAT, **STREAM})
    expected = b"".join(map(event, cluster.decode.first_events))
    assert response.content == expected + cluster.decode.expected_stream(cluster.decode.received[0])


@pytest.mark.parametrize(("attempts", "stream"), [(1, {}), (2, STREAM)], ids=["json", "stream"])
def test_prefill_attempts_are_bounded_when_decode_reports_the_failures(attempts: int, stream: dict[str, Any]) -> None:
    """Prefill has answered, and decode reports that the KV did not come."""
    with running_cluster(attempts=attempts) as cluster:
        explain(cluster.decode)
        response = cluster.complete(**stream)
        assert response.status_code == 503
        message = response.json()["error"]["message"]
        assert message.count("prefill rank 1 went silent") == attempts
        assert message.endswith("; decode did not compute the prompt itself")
        assert (len(cluster.prefill.received), len(cluster.decode.received)) == (attempts, attempts + 1)
        last = {"no prefill engine": 2}
        before = {"transfer failed": attempts - 1} if attempts > 1 else {}
        assert counted(cluster)[1]["decode"] == {**before, **last}
