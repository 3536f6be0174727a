# SPDX-License-Identifier: Apache-2.0
"""Requests for which no engine has a free slot: they wait in a bounded queue for a bounded time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_standin import PrefillEngine
from proxy_cluster import STREAM, counted, eventually, running_cluster

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


def test_a_ticket_does_not_wait_for_a_prompt_that_is_computed_first() -> None:
    """That prompt may wait at prefill for room, until the ticket's request has ended."""
    with running_cluster(max_per_prefill=1) as cluster, ThreadPoolExecutor(3) as clients:
        cluster.prefill.holds = cluster.decode.intends = True
        answers = [clients.submit(cluster.complete) for _ in range(2)]
        eventually(lambda: len(cluster.decode.tickets) == 2)
        assert cluster.prefill.working.wait(10)
        assert len(cluster.prefill.received) == 1
        cluster.decode.intends = False
        answers.append(clients.submit(cluster.complete))
        eventually(lambda: len(cluster.prefill.received) == 2)
        assert "ticket_follows" not in cluster.prefill.received[1].body["kv_transfer_params"]
        cluster.prefill.holds = False
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert cluster.prefill.most_at_once == 2


def test_requests_that_compute_nothing_do_not_wait_for_those_that_do() -> None:
    with running_cluster(max_concurrent=1, max_per_decode=1, queue_per_engine=0) as cluster, cluster.holding_one():
        assert cluster.client.get("/v1/models", timeout=5).status_code == 200
    with running_cluster(max_per_decode=1, queue_per_engine=0) as cluster, cluster.holding_one():
        assert cluster.client.post("/tokenize", json={"prompt": "a"}, timeout=5).status_code == 200
        assert cluster.client.post("/generative_scoring", json={}, timeout=5).status_code == 429


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


@pytest.mark.parametrize("how", ["removed", "drained"])
def test_a_request_is_refused_at_once_when_all_engines_are_removed(token_file: str, how: str) -> None:
    with (
        running_cluster(max_per_decode=1, admin_token_file=token_file) as cluster,
        ThreadPoolExecutor(1) as client,
        cluster.holding_one(),
    ):
        second = client.submit(cluster.complete)
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
