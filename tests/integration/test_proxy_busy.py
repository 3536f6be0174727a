# SPDX-License-Identifier: Apache-2.0
"""Engines that take no further request for now, as with vLLM's admission control."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_standin import BUSY, PrefillEngine
from proxy_cluster import STREAM, Cluster, beside, counted, eventually, refusing_engine, running_cluster, withheld


def complete_all(cluster: Cluster, number: int, **fields: object) -> list[int]:
    with ThreadPoolExecutor(number) as clients:
        return list(
            clients.map(
                lambda each: cluster.complete(prompt=f"{each} is a prompt", **fields).status_code, range(number)
            )
        )


def test_requests_wait_for_a_busy_engine_and_none_counts_as_a_failure() -> None:
    rooms = {"prefill": 2, "decode": 4}
    with running_cluster(prefill_engine=PrefillEngine(takes=0.05), eject_after=1) as cluster:
        for role, room in rooms.items():
            getattr(cluster, role).room = room
        cluster.decode.waits = 0.05
        assert complete_all(cluster, 40) == [200] * 40
        assert counted(cluster) == ({"prefill": 0, "decode": 0}, {"prefill": {}, "decode": {}})
        roles = cluster.client.get("/status.json").json()["roles"]
        assert {engine["state"] for each in roles for engine in each["engines"]} == {"healthy"}
        for role, room in rooms.items():
            assert getattr(cluster, role).most_at_once <= room


def test_another_engine_takes_the_requests_that_a_busy_one_refuses() -> None:
    small = PrefillEngine(takes=0.05)
    small.room = 1
    with beside(prefill=small, eject_after=1) as cluster:
        assert complete_all(cluster, 40) == [200] * 40
        assert small.served > 0
        assert withheld(cluster)["prefill"] == {}


@pytest.mark.parametrize(("role", "status"), [("prefill", 429), ("decode", 503), ("decode", 200)])
def test_after_the_queue_timeout_the_answer_is_503_with_retry_after(role: str, status: int) -> None:
    """With 200, a stream is refused in its first event."""
    with running_cluster(queue_timeout=0.5) as cluster:
        if status == 200:
            cluster.decode.stream_room = 0
        else:
            getattr(cluster, role).refusal = (status, {"error": {**BUSY["error"], "code": status}})
        begun = time.monotonic()
        response = cluster.complete(stream=status == 200)
        assert 0.4 < time.monotonic() - begun < 10
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert f"all {role} engines are busy" in response.json()["error"]["message"]
        assert set(counted(cluster)[1][role]) == {"busy"}
        assert len(getattr(cluster, role).received) < 10


def test_a_stream_that_a_busy_engine_refuses_in_its_first_event_waits() -> None:
    with running_cluster(eject_after=1) as cluster:
        cluster.decode.stream_room, cluster.decode.waits = 4, 0.05
        assert complete_all(cluster, 40, **STREAM) == [200] * 40
        assert counted(cluster) == ({"prefill": 0, "decode": 0}, {"prefill": {}, "decode": {}})
        assert withheld(cluster)["decode"] == {}
        assert cluster.decode.most_streams == 4


@pytest.mark.parametrize("slept", [False, True])
def test_a_lone_request_waits_until_the_busy_engine_has_room_again(slept: bool) -> None:
    """No request is there whose end would tell it. `slept`: it is awake, and no check has found so yet."""
    with running_cluster(check_interval=0.05) as cluster, ThreadPoolExecutor(1) as client:
        if slept:
            cluster.decode.metrics = 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
            eventually(lambda: withheld(cluster)["decode"])
        cluster.decode.room = 0
        answer = client.submit(cluster.complete)
        eventually(lambda: len(cluster.decode.received) > 2)
        eventually(lambda: cluster.client.get("/status.json").json()["requests"]["phases"]["queued"] == 1)
        cluster.decode.room = None
        assert answer.result().status_code == 200


def test_an_engine_that_cannot_be_reached_counts_once_however_often_a_busy_one_is_asked() -> None:
    with refusing_engine() as gone, running_cluster(other_prefill=(gone,)) as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.room = 0
        answer = client.submit(cluster.complete)
        eventually(lambda: len(cluster.prefill.received) > 3)
        cluster.prefill.room = None
        assert answer.result().status_code == 200
        assert f'engine_ejected{{engine="{gone}",role="prefill"}} 0.0' in cluster.client.get("/metrics").text


@pytest.mark.parametrize(("healthy", "body"), [(False, BUSY), (True, {"error": "gone"})])
def test_a_503_of_an_engine_that_is_not_well_is_a_failure(healthy: bool, body: dict[str, object]) -> None:
    """A dead engine's, or a gateway's."""
    with running_cluster(check_interval=0.05, eject_after=1) as cluster:
        cluster.decode.refusal = (503, body)
        cluster.decode.healthy = healthy
        if not healthy:
            eventually(lambda: withheld(cluster)["decode"])
        assert cluster.complete().status_code == 503
        assert counted(cluster)[1]["decode"] == {"server error": 1}
