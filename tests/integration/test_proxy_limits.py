# SPDX-License-Identifier: Apache-2.0
"""Requests for which no engine has a free slot: they wait in a bounded queue for a bounded time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_standin import PrefillEngine, Servers
from proxy_cluster import STREAM, beside, counted, eventually, running_cluster

EITHER = pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])


def test_requests_wait_for_a_slot() -> None:
    """Decode is not asked to compute them meanwhile."""
    with running_cluster(max_per_decode=1, max_per_prefill=1) as cluster, ThreadPoolExecutor(6) as clients:
        cluster.decode.waits, cluster.decode.computes_itself = 0.1, True
        answers = [clients.submit(cluster.complete, prompt=["a", "b"]) for _ in range(6)]
        assert [answer.result().status_code for answer in answers] == [200] * 6
        assert (len(cluster.decode.received), len(cluster.prefill.received)) == (6, 12)
        assert cluster.decode.most_at_once == 1
        assert cluster.prefill.most_at_once == 1


def test_a_full_queue_at_decode_is_429() -> None:
    with running_cluster(max_per_decode=1, queue_per_engine=0) as cluster, ThreadPoolExecutor(1) as client:
        cluster.decode.waits = 1.0
        first = client.submit(cluster.complete)
        assert cluster.decode.working.wait(10)
        refused = cluster.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "TooManyRequestsError"
        assert first.result().status_code == 200
        assert len(cluster.decode.received) == 1
        assert counted(cluster)[1]["decode"] == {"full": 1}


@EITHER
def test_no_slot_for_a_prefill_in_time_is_429(stream: dict[str, object]) -> None:
    """The request ends at decode too, and is not retried."""
    with running_cluster(max_per_prefill=1, queue_timeout=0.2) as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.hangs = True
        first = client.submit(cluster.complete)
        assert cluster.prefill.working.wait(10)
        cluster.decode.hangs_when_prefill_fails = True
        refused = cluster.complete(**stream)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        bound = "no slot became free within 0.2 s (--queue-timeout)"
        said = f"prefill failed: all prefill engines are busy: {bound}: retry later"
        assert refused.json()["error"]["message"] == said
        assert cluster.decode.cancelled.wait(10)
        assert len(cluster.prefill.received) == 1
        assert len(cluster.decode.received) == 2
        cluster.prefill.hangs = False
        cluster.report_failure("over")
        assert first.result().status_code == 200


@pytest.mark.parametrize("several", [{"prompt": ["a"] * 30}, {"n": 30}], ids=["prompts", "samples"])
def test_prompts_of_one_request_wait_for_each_other_however_many_they_are(several: dict[str, object]) -> None:
    """They hold one place in the queue. Once one of them has been computed, the others wait without a timeout."""
    slow = PrefillEngine(takes=0.1)
    with running_cluster(prefill_engine=slow, max_per_prefill=2, queue_per_engine=1, queue_timeout=0.5) as cluster:
        assert cluster.complete(**several).status_code == 200
        assert (len(slow.received), slow.most_at_once) == (30, 2)


def test_a_request_of_one_prompt_does_not_wait_for_all_prompts_of_another() -> None:
    slow = PrefillEngine(takes=0.1)
    with running_cluster(prefill_engine=slow, max_per_prefill=1) as cluster, ThreadPoolExecutor(1) as client:
        batch = client.submit(cluster.complete, prompt=["a"] * 30)
        eventually(lambda: len(cluster.decode.tickets) == 30)
        assert cluster.complete(prompt="b").status_code == 200
        computed = [sent.body["prompt"] for sent in slow.received]
        assert len(computed) < 30
        assert batch.result().status_code == 200


def test_a_client_that_leaves_the_queue_takes_no_slot() -> None:
    with running_cluster(max_per_decode=1) as cluster, ThreadPoolExecutor(2) as client:
        cluster.decode.waits = 1.0
        first = client.submit(cluster.complete)
        assert cluster.decode.working.wait(10)
        cluster.send_only("/v1/completions", {"model": "tiny", "prompt": "x"}).close()
        assert client.submit(cluster.complete).result().status_code == 200
        assert first.result().status_code == 200
        assert len(cluster.decode.received) == 2


def test_a_waiting_request_is_served_by_an_engine_added_meanwhile(token_file: str) -> None:
    new = PrefillEngine()
    with (
        Servers() as servers,
        running_cluster(max_per_prefill=1, admin_token_file=token_file) as cluster,
        ThreadPoolExecutor(2) as clients,
    ):
        cluster.prefill.holds = True
        first = clients.submit(cluster.complete)
        assert cluster.prefill.working.wait(10)
        second = clients.submit(cluster.complete)
        headers = {"Authorization": "Bearer a-secret"}

        def waiting() -> int:
            answer = cluster.client.get("/status.json", headers=headers)
            return int(answer.json()["roles"][0]["waiting"])

        eventually(lambda: waiting() == 1)
        engine = {"role": "prefill", "url": servers.start(lambda _: new.app)}
        assert cluster.client.post("/admin/engines", headers=headers, json=engine).status_code == 201
        assert second.result().status_code == 200
        assert len(new.received) == 1
        cluster.prefill.holds = False
        assert first.result().status_code == 200


@pytest.mark.parametrize("how", ["removed", "drained"])
def test_a_request_is_refused_at_once_when_all_engines_are_removed(token_file: str, how: str) -> None:
    with running_cluster(max_per_decode=1, admin_token_file=token_file) as cluster, ThreadPoolExecutor(2) as clients:
        cluster.prefill.holds = True
        first = clients.submit(cluster.complete)
        assert cluster.prefill.working.wait(10)
        second = clients.submit(cluster.complete)
        headers = {"Authorization": "Bearer a-secret"}

        def decode() -> dict[str, Any]:
            role: dict[str, Any] = cluster.client.get("/status.json", headers=headers).json()["roles"][1]
            return role

        eventually(lambda: decode()["waiting"] == 1)
        [engine] = decode()["engines"]
        path = f"/admin/engines/{engine['id']}"
        method, path = ("DELETE", path) if how == "removed" else ("POST", f"{path}:drain")
        assert cluster.client.request(method, path, headers=headers).status_code == 200
        refused = second.result(timeout=10)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "no decode engine is available"
        cluster.prefill.holds = False
        assert first.result().status_code == 200


def test_other_engine_is_asked_when_the_best_is_full() -> None:
    """Both engines have the prefix; the one with a free slot is asked."""
    other = PrefillEngine()
    with beside(other, max_per_prefill=1, attempts=1) as cluster, ThreadPoolExecutor(2) as clients:
        prompt = "the same long prompt " * 200
        assert cluster.complete(prompt=prompt).status_code == 200
        first, second = (other, cluster.prefill) if other.received else (cluster.prefill, other)
        cluster.decode.waits = 0.0
        first.holds = True
        waiting = clients.submit(cluster.complete, prompt=prompt)
        eventually(lambda: len(first.received) == 2)
        assert cluster.complete(prompt=prompt).status_code == 200
        assert len(second.received) == 1
        first.holds = False
        assert waiting.result().status_code == 200
