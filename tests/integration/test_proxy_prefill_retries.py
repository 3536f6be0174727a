# SPDX-License-Identifier: Apache-2.0
"""Prefills that fail: where the proxy retries them, how often, and what the client gets if all fail."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_standin import DecodeEngine, PrefillEngine, make_ticket
from proxy_cluster import STREAM, Cluster, Servers, beside, closing_server, counted, eventually, running_cluster

from vllm_ascend_pd.core.protocol import METASERVER_PATH

EITHER = pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])


def refuse(engine: PrefillEngine) -> None:
    engine.refusal = (500, {"error": {"message": "out of luck"}})


def fail_transfer(engine: PrefillEngine) -> None:
    engine.transfer_error = "this ticket is being served already"


def hang(engine: PrefillEngine) -> None:
    engine.hangs = True
    engine.metrics = "vllm:prompt_tokens_total 7\n"


def freeze(engine: PrefillEngine) -> None:
    engine.frozen = True


QUICK = {"read_timeout": 0.5, "check_interval": 0.05}


@pytest.mark.parametrize(
    ("fault", "kind", "settings"), [(refuse, "server error", {}), (hang, "timeout", QUICK)], ids=["http-500", "silent"]
)
def test_without_another_decode_attempt_a_failed_prefill_is_final(
    fault: Callable[[PrefillEngine], None], kind: str, settings: dict[str, Any]
) -> None:
    """The ticket is the first engine's, so no other engine gets it."""
    failing = PrefillEngine()
    fault(failing)
    with beside(prefill=failing, attempts=1, **settings) as cluster:
        cluster.client.headers["X-Who-Computes"] = "prefill"  # else decode is asked to compute the prompt
        response = cluster.complete()
        assert response.status_code == 502
        assert response.json()["error"]["message"].startswith("prefill failed: ")
        assert (len(failing.received), len(cluster.prefill.received), len(cluster.decode.received)) == (1, 0, 1)
        failures = {"prefill": {kind: 1}, "decode": {"prefill failed": 1}}
        if kind == "timeout":
            failures["decode"] = {"no prefill engine": 1}
        assert counted(cluster) == ({"prefill": 0, "decode": 0}, failures)


@pytest.mark.parametrize(
    ("fault", "kind", "settings", "stream"),
    [
        (refuse, "server error", {}, {}),
        (fail_transfer, "transfer failed", {}, STREAM),
        (hang, "timeout", QUICK, {}),
        (freeze, "timeout", {"probe_timeout": 0.5}, STREAM),
    ],
    ids=["http-500", "transfer", "silent", "frozen"],
)
def test_failed_prefill_is_replaced_under_a_new_request(
    fault: Callable[[PrefillEngine], None], kind: str, settings: dict[str, Any], stream: dict[str, Any]
) -> None:
    """The first engine may still write into the old request's blocks, so decode keeps those until it has stopped."""
    failing = PrefillEngine()
    fault(failing)
    with beside(prefill=failing, **settings) as cluster:
        assert cluster.complete(**stream).status_code == 200
        (first,), (second,) = failing.received, cluster.prefill.received
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        if kind == "timeout":
            assert failing.cancelled.wait(5)
        failing.frozen = False
        failures = {"prefill": {kind: 1}, "decode": {"transfer failed": 1}}
        assert counted(cluster) == ({"prefill": 0, "decode": 1}, failures)


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


@pytest.mark.parametrize("decode", [1, 2])
def test_the_only_prefill_engine_is_asked_again_only_after_failures_not_its_own(decode: int) -> None:
    with Servers() as others:
        urls = tuple(others.start(lambda _: DecodeEngine().app) for _ in range(decode - 1))
        with running_cluster(other_decode=urls) as cluster:
            refuse(cluster.prefill)
            assert cluster.complete().status_code == 502
            assert len(cluster.prefill.received) == 1
        with running_cluster(other_decode=urls) as cluster:
            fail_transfer(cluster.prefill)
            assert cluster.complete().status_code == 503
            assert len(cluster.prefill.received) == 2
        with closing_server() as (url, seen), running_cluster(only_prefill=(url,), other_decode=urls) as cluster:
            assert cluster.complete().status_code == 502
            assert len(seen) == 2
            assert counted(cluster)[1]["prefill"] == {"connection lost": 2}


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


@EITHER
def test_a_decode_engine_that_recomputes_answers_after_a_failed_prefill(stream: dict[str, Any]) -> None:
    with running_cluster(attempts=1) as cluster:
        fail_transfer(cluster.prefill)
        cluster.decode.recomputes = True
        assert cluster.complete(**stream).status_code == 200
        assert cluster.decode.metaserver_answers == [
            (502, {"error": "this ticket is being served already", "may_follow": False})
        ]
        assert len(cluster.decode.received) == 1


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
