# SPDX-License-Identifier: Apache-2.0
"""Responses that take longer than any timeout: the proxy waits for a healthy engine, but not for a stopped one."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from engine_standin import DecodeEngine, PrefillEngine, Servers, _Engine
from proxy_cluster import STREAM, Cluster, beside, counted, eventually, running_cluster, stub_engine

SHORT = {"read_timeout": 1.0, "probe_timeout": 0.3, "check_interval": 0.1}
LONG_S = 3.5


def computed(tokens: int, running: int = 1, of_prompts: int = 7) -> str:
    """vLLM's `/metrics` of an engine that has generated this many tokens, and computed so many `of_prompts`."""
    labels = '{engine="0",model_name="tiny"}'
    return "".join(
        f"vllm:{name}{labels} {value}.0\n"
        for name, value in (
            ("num_requests_running", running),
            ("num_requests_waiting", 0),
            ("prompt_tokens_total", of_prompts),
            ("generation_tokens_total", tokens),
        )
    )


@contextmanager
def computing(engine: _Engine) -> Iterator[None]:
    """Makes the engine's metrics show that it generates tokens, or prefill's, that it computes prompts."""
    ended = threading.Event()

    def compute() -> None:
        tokens = 0
        while not ended.wait(0.05):
            tokens += 1
            engine.metrics = computed(tokens) if isinstance(engine, DecodeEngine) else computed(1, of_prompts=tokens)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


def test_a_long_answer_of_a_computing_decode_engine_is_waited_for() -> None:
    slow = DecodeEngine()
    slow.waits = LONG_S
    with computing(slow), running_cluster(decode_engine=slow, **SHORT) as cluster:
        assert cluster.complete().status_code == 200
        assert len(slow.received) == 1
        assert counted(cluster) == ({"prefill": 0, "decode": 0}, {"prefill": {}, "decode": {}})


def test_a_long_answer_of_a_healthy_engine_without_metrics_is_waited_for() -> None:
    with running_cluster(**SHORT) as cluster:
        cluster.decode.waits = LONG_S
        assert cluster.complete().status_code == 200
        assert counted(cluster)[1]["decode"] == {}


def test_long_pause_between_tokens_ends_no_stream() -> None:
    with running_cluster(**SHORT) as cluster, computing(cluster.decode):
        cluster.decode.pauses = LONG_S / 2
        answer = cluster.complete(n=2, **STREAM)
        assert answer.content == cluster.decode.expected_stream(cluster.decode.received[0])


def test_both_sides_wait_for_a_long_prefill() -> None:
    """Prefill computes, others' prompts perhaps, so decode has nothing to compute."""
    slow = PrefillEngine(takes=LONG_S)
    with running_cluster(prefill_engine=slow, **SHORT) as cluster, computing(slow):
        cluster.decode.metrics = computed(0, running=0)
        assert cluster.complete().status_code == 200
        assert counted(cluster) == ({"prefill": 0, "decode": 0}, {"prefill": {}, "decode": {}})


def test_a_request_lost_by_a_healthy_decode_engine_goes_to_another() -> None:
    """It answers health probes, and computes no tokens."""
    lost = DecodeEngine()
    lost.hangs = True
    lost.metrics = computed(5, running=0)
    with beside(decode=lost, **SHORT) as cluster:
        assert cluster.complete(**STREAM).status_code == 200
        assert len(cluster.decode.received) == 1
        assert lost.cancelled.wait(5)
        assert counted(cluster)[1]["decode"] == {"timeout": 1}


@pytest.mark.parametrize("meanwhile", ["", "unhealthy", "removed"])
def test_a_lost_request_names_its_reason(token_file: str, meanwhile: str) -> None:
    """Also if the engine's health checks fail, or it has been removed."""
    limits = {**SHORT, "probe_timeout": 2.0, "silence_timeout": 10.0}
    with running_cluster(attempts=1, admin_token_file=token_file, **limits) as cluster, ThreadPoolExecutor(1) as client:
        cluster.decode.hangs = True
        cluster.decode.metrics = computed(5, running=0)
        lost = client.submit(cluster.complete)
        eventually(lambda: cluster.decode.received)
        cluster.decode.healthy = meanwhile != "unhealthy"
        if meanwhile == "removed":
            token = {"Authorization": "Bearer a-secret"}
            [engine] = cluster.client.get("/status.json", headers=token).json()["roles"][1]["engines"]
            assert cluster.client.delete(f"/admin/engines/{engine['id']}", headers=token).status_code == 200
        answer = lost.result()
        assert answer.status_code == 504
        reason = "decode engine: its metrics show no new token for 1 s"
        assert answer.json()["error"]["message"] == reason


@pytest.mark.parametrize("ends", [False, True], ids=["lost", "drains"])
def test_an_engine_that_takes_no_connections_has_a_while_to_end_its_requests(ends: bool) -> None:
    """vLLM's API server may outlive its engine core, and wait for answers that nobody computes."""
    leaving = PrefillEngine(takes=2.5)
    leaving.holds = not ends
    listener = socket.create_server(("127.0.0.1", 0))
    with Servers() as servers, ThreadPoolExecutor(1) as client:
        url = servers.start(lambda _: leaving.app, listener)
        with running_cluster(other_prefill=(url,), **{**SHORT, "read_timeout": 6.0}) as cluster:
            answer = client.submit(cluster.complete)
            assert leaving.working.wait(10)
            listener.shutdown(socket.SHUT_RDWR)
            assert answer.result().status_code == 200
            assert len(cluster.prefill.received) == (not ends)
            assert counted(cluster)[1]["prefill"] == ({} if ends else {"timeout": 1})
            leaving.holds = False


def test_every_request_has_a_final_timeout() -> None:
    """Even at an engine that computes other requests."""
    with running_cluster(silence_timeout=2.0, **SHORT) as cluster, computing(cluster.decode):
        cluster.decode.hangs = True
        assert cluster.complete().status_code == 504
        assert cluster.decode.cancelled.wait(5)


@contextmanager
def before_another(probe_timeout: float = 0.3) -> Iterator[tuple[subprocess.Popen[str], Cluster]]:
    """A cluster with another decode engine in a process of its own, which is asked first."""
    settings = {**SHORT, "read_timeout": 60.0, "probe_timeout": probe_timeout}
    with stub_engine("decode") as (process, url), running_cluster(other_decode=(url,), **settings) as cluster:
        yield process, cluster


def test_stopped_decode_engine_is_noticed_before_its_answer_and_another_asked() -> None:
    with before_another() as (process, cluster), ThreadPoolExecutor(1) as client:
        cluster.prefill.holds = True
        answer = client.submit(cluster.complete)
        assert cluster.prefill.working.wait(10)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: cluster.decode.received, timeout_s=15)
        cluster.prefill.holds = False
        assert answer.result().status_code == 200
        assert counted(cluster)[1]["decode"] == {"timeout": 1}


def test_stopped_decode_engine_is_noticed_in_a_stream_after_the_probes_timeout() -> None:
    with before_another(probe_timeout=3.0) as (process, cluster):
        body = {"model": "tiny", "prompt": "x", "max_tokens": 8, "token_ms": 60_000, **STREAM}
        with cluster.client.stream("POST", "/v1/completions", json=body, timeout=20) as answer:
            events = answer.iter_raw()
            assert b"token0" in next(events)
            process.send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            rest = b"".join(events)
            assert time.monotonic() - stopped_at < 5.5
        assert b"decode engine: no answer to a health probe within 3 s" in rest
        assert not cluster.decode.received
