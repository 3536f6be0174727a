# SPDX-License-Identifier: Apache-2.0
"""Attempts that fail while others are under way: which are ended, which are made again, and in which order. The table
of single failures is in test_proxy_answers.py."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_standin import DecodeEngine, PrefillEngine, event, make_failure, make_ticket
from proxy_cluster import CHAT, STREAM, Cluster, Servers, beside, closing_server, counted, eventually, running_cluster

from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


def test_engines_that_close_the_connection() -> None:
    """Another one is asked. The only prefill engine is asked again, since that may have been an accident."""
    with closing_server() as (url, seen), running_cluster(other_decode=(url,)) as cluster:
        assert cluster.complete().status_code == 200
        assert len(seen) == 1
        assert counted(cluster)[1] == {"prefill": {}, "decode": {"connection lost": 1}}
    with closing_server() as (url, seen), running_cluster(only_prefill=(url,)) as cluster:
        assert cluster.complete().status_code == 502
        assert len(seen) == 2
        assert counted(cluster)[1]["prefill"] == {"connection lost": 2}


# --- decode ------------------------------------------------------------------------------------------------


def test_prefills_of_a_failed_attempt_are_cancelled_first() -> None:
    """The first engine posts its ticket and dies."""
    dying = DecodeEngine()
    dying.waits = 60.0  # it does not answer first when it hears that its prefill has ended
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


# --- prefill -----------------------------------------------------------------------------------------------


def fail_transfer(engine: PrefillEngine) -> None:
    engine.transfer_error = "this ticket is being served already"


def hang(engine: PrefillEngine) -> None:
    engine.hangs = True
    engine.metrics = "vllm:prompt_tokens_total 7\n"


def freeze(engine: PrefillEngine) -> None:
    engine.frozen = True


def test_a_slow_prefill_that_answers_probes_continues() -> None:
    with running_cluster() as cluster, ThreadPoolExecutor(1) as client:
        assert cluster.prefill.probed.acquire(timeout=20)  # the one check
        hang(cluster.prefill)
        answer = client.submit(cluster.complete)
        assert cluster.prefill.probed.acquire(timeout=20)
        assert cluster.prefill.probed.acquire(timeout=20)
        assert not cluster.prefill.cancelled.is_set()
        cluster.prefill.hangs = False
        cluster.report_failure("over")
        assert answer.result().status_code == 200


def test_attempts_are_bounded_and_all_reasons_are_reported() -> None:
    """A prompt that kills engines kills at most two."""
    engines = [PrefillEngine(), PrefillEngine()]
    with Servers() as others:
        urls = tuple(others.start(lambda _, engine=engine: engine.app) for engine in engines)
        with running_cluster(other_prefill=urls) as cluster:
            everyone = (*engines, cluster.prefill)
            for number, engine in enumerate(everyone):
                engine.refusal = (500, {"error": f"engine {number} is out of luck"})
            response = cluster.complete(stream=True)
            assert response.status_code == 502
            error = response.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("BadGatewayError", None, 502)
            message = error["message"]
            assert message.startswith("prefill failed: attempt 1: HTTP 500 from the prefill engine")
            assert "; attempt 2: HTTP 500 from the prefill engine" in message
            assert "attempt 3" not in message
            assert "127.0.0.1" not in message, "clients do not learn engines' addresses"
            assert sorted(len(engine.received) for engine in everyone) == [0, 1, 1]
            for number, engine in enumerate(everyone):
                assert (f"engine {number} is out of luck" in message) is bool(engine.received)
            assert counted(cluster)[0] == {"prefill": 0, "decode": 1}


def test_samples_of_a_prompt_do_not_use_up_each_others_attempts() -> None:
    failing = PrefillEngine()
    fail_transfer(failing)
    failing.holds = True
    with beside(prefill=failing) as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.holds = True
        answer = client.submit(cluster.complete, n=4)
        eventually(lambda: len(failing.received) + len(cluster.prefill.received) == 4)
        assert len(failing.received) > 1
        failing.holds = cluster.prefill.holds = False
        assert answer.result().status_code == 200


def test_a_retry_is_served_before_requests_that_wait_for_their_first_slot() -> None:
    failing = PrefillEngine()
    fail_transfer(failing)
    failing.holds = True
    with (
        beside(prefill=failing, max_per_decode=1, queue_per_engine=1) as cluster,
        ThreadPoolExecutor(2) as clients,
    ):
        first = clients.submit(cluster.complete)
        assert failing.working.wait(5)
        waiting = clients.submit(cluster.complete)
        eventually(lambda: cluster.client.get("/status.json").json()["requests"]["phases"]["queued"] == 1)
        failing.holds = False
        assert (first.result().status_code, waiting.result().status_code) == (200, 200)


@pytest.mark.parametrize("loses_first", [False, True], ids=["both wait", "the first is lost"])
def test_r10_a_ticket_posted_again_joins_its_prefill(cluster: Cluster, loses_first: bool) -> None:
    """Decode lost its connection. A second prefill would write beside the first one."""
    cluster.decode.needs_prefill = False
    cluster.prefill.holds = True
    with cluster.streaming() as (request_id, _):
        ticket = make_ticket(f"cmpl-{request_id}-0", "t")
        first = cluster.send_only(METASERVER_PATH, ticket)
        assert cluster.prefill.working.wait(5)
        if loses_first:
            first.close()
        second = cluster.send_only(METASERVER_PATH, ticket)
        eventually(lambda: cluster.client.post(METASERVER_PATH + "/waiting", json={"ticket_ids": ["t"]}).json())
        cluster.prefill.holds = False
        assert second.getresponse().status == 200
        second.close()
        if not loses_first:
            assert first.getresponse().status == 200
            first.close()
        # The answer to the last post was lost, too.
        assert cluster.client.post(METASERVER_PATH, json=ticket).status_code == 200
    assert len(cluster.prefill.received) == 1
    assert not cluster.prefill.cancelled.is_set()


def test_the_prefill_of_a_ticket_posted_again_is_watched() -> None:
    with running_cluster(probe_timeout=0.3, attempts=1) as cluster:
        cluster.decode.needs_prefill = False
        hang(cluster.prefill)
        with cluster.streaming() as (request_id, _):
            ticket = make_ticket(f"cmpl-{request_id}-0", "t")
            first = cluster.send_only(METASERVER_PATH, ticket)
            assert cluster.prefill.working.wait(5)
            second = cluster.send_only(METASERVER_PATH, ticket)
            freeze(cluster.prefill)
            for post in (first, second):
                answer = post.getresponse()
                assert answer.status == 502
                assert "no answer to a health probe" in answer.read().decode()
                post.close()
        assert len(cluster.prefill.received) == 1
        cluster.prefill.frozen = False


def test_more_prompts_than_the_proxy_may_prefill_at_a_time_wait_for_each_other() -> None:
    """So connections do not run out, whatever one request asks for."""
    with running_cluster(max_concurrent=1) as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.holds = True
        answer = client.submit(cluster.complete, prompt=["the quick brown fox"] * 8)
        eventually(lambda: cluster.client.get("/status.json").json()["roles"][0]["waiting"] == 4)
        eventually(lambda: len(cluster.prefill.received) == 4)
        cluster.prefill.holds = False
        assert answer.result().status_code == 200
        assert cluster.prefill.most_at_once == 4


# --- failures that decode reports --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])
def test_decode_reports_a_prefill_that_hangs(stream: dict[str, Any]) -> None:
    """A new decode request follows, whose prefill another engine computes."""
    frozen = PrefillEngine()
    frozen.hangs = True
    with beside(prefill=frozen) as cluster, ThreadPoolExecutor(1) as client:
        answer = client.submit(cluster.complete, **stream)
        assert frozen.working.wait(5)
        cluster.report_failure("prefill rank 0 went silent")
        assert answer.result().status_code == 200
        assert frozen.cancelled.wait(5)
        (served,) = cluster.prefill.received
        assert served.headers["x-request-id"] != frozen.received[0].headers["x-request-id"]
        assert len(cluster.decode.received) == 2
        assert counted(cluster)[0] == {"prefill": 0, "decode": 1}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"request_id": "cmpl-x-0"}', 400),
        (b" " * 70_000, 413),
        (json.dumps(make_failure(make_ticket("cmpl-x-0", "t"), "why")).encode(), 404),
    ],
)
def test_invalid_failure_reports_are_refused(idle_cluster: Cluster, body: bytes, status: int) -> None:
    assert idle_cluster.client.post(METASERVER_PATH + FAILURE_SUFFIX, content=body).status_code == status


def test_reason_in_the_middle_of_a_stream(cluster: Cluster) -> None:
    cluster.decode.fails_after_first_token = True
    cluster.decode.explains = "prefill rank 1 went silent"
    response = cluster.complete(stream=True)
    token, error, done = response.text.strip().split("\n\n")
    assert "ÿ 0" in json.loads(token.removeprefix("data: "))["text"]
    shown = json.loads(error.removeprefix("data: "))["error"]
    assert (shown["message"], shown["code"]) == ("KV transfer failed: prefill rank 1 went silent", 502)
    assert done == "data: [DONE]"
    assert len(cluster.decode.received) == 1
    assert counted(cluster)[1]["decode"] == {"transfer failed": 1}
