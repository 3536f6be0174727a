# SPDX-License-Identifier: Apache-2.0
"""Routing by the engines' load reports, their health, and what the proxy has sent them."""

from __future__ import annotations

import pytest
from engine_standin import DecodeEngine, PrefillEngine
from proxy_cluster import CHAT, beside, eventually, withheld

OFTEN = {"check_interval": 0.1}


def metrics(running: int, waiting: int, kv_use: float) -> str:
    return (
        f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
        f'vllm:kv_cache_usage_perc {kv_use}\nvllm:cache_config_info{{num_gpu_blocks="1000",block_size="128"}} 1\n'
    )


def test_engines_that_other_proxies_keep_busy_get_fewer_requests() -> None:
    prefill, decode = PrefillEngine(), DecodeEngine()
    prefill.metrics, decode.metrics = metrics(8, 20, 0.5), metrics(100, 0, 0.9)
    with beside(prefill, decode, **OFTEN) as cluster:
        cluster.prefill.metrics, cluster.decode.metrics = metrics(0, 0, 0.0), metrics(90, 0, 0.1)
        for engine in (prefill, decode, cluster.prefill, cluster.decode):
            for _ in range(2):  # the first answer has been read when the second is asked for
                assert engine.metrics_read.acquire(timeout=20)
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert prefill.received == decode.received == []


def test_conversations_stay_at_the_engine_with_their_prefix() -> None:
    prefill, decode = PrefillEngine(), DecodeEngine()
    with beside(prefill, decode) as cluster:
        turns = [{"role": "user", "content": "all about KV caches " * 100}]
        for number in range(4):
            turns.append({"role": "user", "content": f"question {number}"})
            body = {**CHAT, "messages": turns}
            assert cluster.client.post("/v1/chat/completions", json=body).status_code == 200
        for one, other in ((prefill, cluster.prefill), (decode, cluster.decode)):
            assert sorted((len(one.received), len(other.received))) == [0, 4]


def test_ejection_and_return() -> None:
    sick = DecodeEngine()
    sick.healthy = False
    with beside(decode=sick, eject_after=2, return_after=2, **OFTEN) as cluster:
        eventually(lambda: list(withheld(cluster)["decode"].values()) == ["ejected: HTTP 503"])
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert sick.received == []
        # It is better than none.
        cluster.decode.refusal = (503, {"error": {"message": "shutting down"}})
        assert cluster.complete().status_code == 200
        assert len(sick.received) == 1
        sick.healthy = True
        eventually(lambda: withheld(cluster) == {"prefill": {}, "decode": {}})
        cluster.decode.refusal = None
        sick.received.clear()
        for _ in range(4):
            assert cluster.complete().status_code == 200
        assert sick.received


def test_a_prefill_engine_that_must_be_restarted_is_avoided() -> None:
    """Its `/health` stays good; only its metrics report it."""
    broken = PrefillEngine()
    broken.metrics = metrics(0, 0, 0.0)
    with beside(broken, eject_after=10_000, return_after=2, **OFTEN) as cluster:
        eventually(lambda: withheld(cluster) == {"prefill": {}, "decode": {}})
        broken.metrics += 'vllm:kv_pd_restart_needed{engine="0",rank="0/0"} 0.0\n'
        broken.metrics += 'vllm:kv_pd_restart_needed{engine="0",rank="0/1"} 1.0\n'
        eventually(lambda: len(withheld(cluster)["prefill"]) == 1)
        [(url, why)] = withheld(cluster)["prefill"].items()
        assert why.startswith("ejected: it must be restarted")
        eventually(lambda: "must be restarted" in cluster.client.get("/health").json()["prefill"][url])
        assert f'vllm:kv_pd_proxy_engine_up{{engine="{url}",role="prefill"}} 0.0' in cluster.client.get("/metrics").text
        [shown] = [e for e in cluster.client.get("/status.json").json()["roles"][0]["engines"] if e["url"] == url]
        assert (shown["state"], "must be restarted" in shown["reason"]) == ("ejected", True)
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert broken.received == []
        # It is better than none.
        cluster.prefill.refusal = (503, {"error": {"message": "shutting down"}})
        assert cluster.complete().status_code == 200
        assert len(broken.received) == 1
        broken.metrics = metrics(0, 0, 0.0)  # it was restarted
        eventually(lambda: withheld(cluster) == {"prefill": {}, "decode": {}})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_sleeps_is_avoided_until_it_is_awake(role: str) -> None:
    """Its `/health` stays good. vLLM would keep the requests until it is awake."""
    dozing = PrefillEngine() if role == "prefill" else DecodeEngine()
    awake = dozing.metrics = metrics(0, 0, 0.0) + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n'
    with beside(**{role: dozing}, eject_after=10_000, return_after=2, **OFTEN) as cluster:
        eventually(lambda: withheld(cluster) == {"prefill": {}, "decode": {}})
        dozing.metrics = awake.replace("1.0", "0.0")
        eventually(lambda: list(withheld(cluster)[role].values()) == ["ejected: it sleeps"])
        dozing.received.clear()
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert dozing.received == []
        dozing.metrics = awake
        eventually(lambda: withheld(cluster) == {"prefill": {}, "decode": {}})


def test_an_engine_that_fails_every_request_does_not_count_as_idle() -> None:
    broken = PrefillEngine()
    broken.transfer_error = "no device"
    with beside(broken, eject_after=2) as cluster:
        for _ in range(12):
            assert cluster.complete().status_code == 200
        assert len(broken.received) == 2
