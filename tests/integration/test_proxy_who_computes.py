# SPDX-License-Identifier: Apache-2.0
"""What decode is told before it decides who computes a prompt, and what becomes of prompts without prefill engines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from engine_standin import DecodeEngine, PrefillEngine
from proxy_cluster import (
    COMPLETION,
    STREAM,
    Cluster,
    beside,
    closing_server,
    counted,
    eventually,
    refusing_engine,
    running_cluster,
)

HEADER = "X-Who-Computes"
EITHER = pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])
_ADVICE = ("who_computes", "prefill_available", "prefill_wait_s")


def told(decode: DecodeEngine) -> list[dict[str, Any]]:
    """What the decode engine was told with each request."""
    params = [received.body["kv_transfer_params"] for received in decode.received]
    return [{name: each[name] for name in _ADVICE if name in each} for each in params]


def sample(cluster: Cluster, name: str) -> float:
    """The proxy's metric, by its name and labels."""
    lines = cluster.client.get("/metrics").text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f"vllm:kv_pd_proxy_{name} ")]
    return float(value)


def asked_without_prefill(cluster: Cluster) -> float:
    return sample(cluster, "requests_without_prefill_total")


@contextmanager
def without_prefill(computes_itself: bool = True, **settings: Any) -> Iterator[Cluster]:
    """A cluster whose only prefill engine does not run, and looks healthy until its first failed requests."""
    decode = DecodeEngine()
    decode.computes_itself = computes_itself
    with refusing_engine() as url, running_cluster(only_prefill=(url,), decode_engine=decode, **settings) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("values", "who"),
    [
        (["Prefill"], "prefill"),
        (["DECODE", "decode"], "decode"),
        (["decode, decode"], "decode"),
    ],
)
def test_header_reaches_decode_as_a_parameter(cluster: Cluster, values: list[str], who: str) -> None:
    headers = [(HEADER, value) for value in values]
    assert cluster.client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
    assert told(cluster.decode) == [{"who_computes": who}]
    for received in (*cluster.decode.received, *cluster.prefill.received):
        assert HEADER.lower() not in received.headers
    assert "who_computes" not in cluster.prefill.received[0].body["kv_transfer_params"]


def test_decode_that_computes_itself_posts_no_ticket(cluster: Cluster) -> None:
    cluster.decode.computes_itself = True
    answer = cluster.client.post("/v1/completions", json=COMPLETION, headers={HEADER: "decode"})
    assert answer.status_code == 200
    assert cluster.prefill.received == cluster.decode.tickets == []
    assert asked_without_prefill(cluster) == 0


@pytest.mark.parametrize("values", [[""], ["both"], ["decode, prefill"], ["decode", "prefill"], ["décode"]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_any_other_header_is_refused(idle_cluster: Cluster, path: str, values: list[str]) -> None:
    headers = [(HEADER, value.encode()) for value in values]
    answer = idle_cluster.client.post(path, json=COMPLETION, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the header X-Who-Computes must be either decode or prefill"


def test_routes_without_prompts_ignore_the_header(cluster: Cluster) -> None:
    answer = cluster.client.post("/tokenize", json={"prompt": "a"}, headers={HEADER: "nobody"})
    assert answer.status_code == 200
    assert HEADER.lower() not in cluster.decode.received[0].headers


@EITHER
def test_decode_computes_what_no_prefill_engine_can_get(stream: dict[str, Any]) -> None:
    with without_prefill() as cluster:
        assert cluster.complete(**stream).status_code == 200
        assert told(cluster.decode) == [{}, {"prefill_available": False}]
        first, second = cluster.decode.received
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        assert len(cluster.decode.tickets) == 1
        assert asked_without_prefill(cluster) == 1
        assert counted(cluster)[0] == {"prefill": 0, "decode": 1}
        assert counted(cluster)[1]["decode"] == {"no prefill engine": 1}


@pytest.mark.parametrize(("attempts", "stream"), [(1, {}), (3, STREAM)], ids=["json", "stream"])
def test_decode_is_asked_once_and_the_client_gets_an_error(attempts: int, stream: dict[str, Any]) -> None:
    with without_prefill(computes_itself=False, attempts=attempts) as cluster:
        answer = cluster.complete(**stream)
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert message.startswith("prefill failed: ")
        assert "prefill engine: ConnectError" in message
        assert "127.0.0.1" not in message
        assert message.endswith("; decode did not compute the prompt itself")
        assert told(cluster.decode) == [{}, {"prefill_available": False}]
        assert asked_without_prefill(cluster) == 1


def test_engines_that_are_not_well_are_told_at_once() -> None:
    """After as many failed requests in a row, the prefill engine is passed over."""
    with without_prefill(eject_after=2) as cluster:
        for _ in range(3):
            assert cluster.complete().status_code == 200
        assert told(cluster.decode) == [{}, {"prefill_available": False}] * 2 + [{"prefill_available": False}]
        assert asked_without_prefill(cluster) == 3


def test_fallback_can_be_switched_off() -> None:
    with without_prefill(eject_after=1) as cluster:
        for _ in range(2):
            answer = cluster.client.post("/v1/completions", json=COMPLETION, headers={HEADER: "prefill"})
            assert answer.status_code == 502
        assert [each.get("prefill_available") for each in told(cluster.decode)] == [None, None]
        assert asked_without_prefill(cluster) == 0


def test_without_engines_decode_is_told_until_one_is_back(token_file: str) -> None:
    admin = {"Authorization": "Bearer a-secret"}
    with running_cluster(admin_token_file=token_file) as cluster:
        listed = cluster.client.get("/admin/engines", headers=admin).json()["engines"]
        (prefill,) = (engine["id"] for engine in listed if engine["role"] == "prefill")
        assert cluster.client.post(f"/admin/engines/{prefill}:drain", headers=admin).status_code == 200
        answer = cluster.complete()
        assert answer.status_code == 503
        assert "no prefill engine is available; decode did not compute the prompt itself" in answer.text
        cluster.decode.computes_itself = True
        assert cluster.complete().status_code == 200
        assert told(cluster.decode) == [{"prefill_available": False}] * 2
        assert cluster.client.post(f"/admin/engines/{prefill}:undrain", headers=admin).status_code == 200
        assert cluster.complete().status_code == 200
        assert told(cluster.decode)[2:] == [{}]
        assert len(cluster.prefill.received) == 1


def test_decode_is_not_asked_after_two_engines_failed_with_the_prompt() -> None:
    """The prompt itself may be what stops them."""
    decode = DecodeEngine()
    decode.computes_itself = True
    with (
        closing_server() as (one, _),
        closing_server() as (two, _),
        running_cluster(only_prefill=(one, two), decode_engine=decode) as cluster,
    ):
        assert cluster.complete().status_code == 502
        assert told(cluster.decode) == [{}, {}]


def test_prompt_of_an_engine_that_dies_goes_to_decode_if_no_other_is_there() -> None:
    decode = DecodeEngine()
    decode.computes_itself = True
    with (
        closing_server() as (dies, seen),
        refusing_engine() as gone,
        running_cluster(only_prefill=(dies, gone), decode_engine=decode) as cluster,
    ):
        assert cluster.complete().status_code == 200
        assert len(seen) == 1
        assert told(cluster.decode) == [{}, {}, {"prefill_available": False}]


def test_decode_is_told_how_long_prefills_queue_is(cluster: Cluster) -> None:
    with ThreadPoolExecutor(1) as client:
        cluster.prefill.takes = 0.1
        assert cluster.complete(prompt="a " * 4000).status_code == 200  # tells the pace
        cluster.prefill.holds = True
        answer = client.submit(cluster.complete, prompt="b " * 8000)
        eventually(lambda: len(cluster.prefill.received) == 2)
        cluster.decode.computes_itself = True
        headers = {HEADER: "decode"}
        assert cluster.client.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
        cluster.prefill.holds = False
        assert answer.result().status_code == 200
    first, second, third = told(cluster.decode)
    assert first == second == {}
    assert third["prefill_wait_s"] >= 0.2  # twice as long a prompt as the first is ahead


def holding(tokens: int) -> str:
    """Metrics of a prefill engine that holds prompts of more tokens until decode has memory for them."""
    return f'vllm:kv_pd_prefill_first_tokens{{engine="0"}} {tokens}.0\n'


def first_tokens(cluster: Cluster) -> int | None:
    """What decode is told of that with a request."""
    assert cluster.complete().status_code == 200
    tokens: int | None = cluster.decode.received[-1].body["kv_transfer_params"].get("prefill_first_tokens")
    return tokens


def test_decode_is_told_which_prompts_all_prefill_engines_hold() -> None:
    """An engine of an earlier version does not say it. One that is not well does not count."""
    other = PrefillEngine()
    with beside(other, check_interval=0.1, eject_after=1, return_after=1) as cluster:
        engines = (other, cluster.prefill)
        other.metrics, cluster.prefill.metrics = holding(2048), holding(512)
        eventually(lambda: first_tokens(cluster) == 2048)
        for metrics in (holding(0), "vllm:num_requests_running 0\n", None):
            for engine in engines:
                said, engine.metrics = engine.metrics, metrics
                eventually(lambda: first_tokens(cluster) is None)
                engine.metrics = said
                eventually(lambda: first_tokens(cluster) == 2048)
        other.metrics, other.healthy = None, False
        eventually(lambda: first_tokens(cluster) == 512)


def test_short_prompts_are_computed_first_while_all_prefill_engines_are_busy() -> None:
    """Their memory would wait for more than a step of prefill."""
    other = PrefillEngine()
    engines = 2

    def told_beside(cluster: Cluster, busy: int) -> int:
        """What decode is told while so many prefill engines compute a prompt."""
        eventually(lambda: sum(len(engine.received) for engine in (other, cluster.prefill)) == busy)
        cluster.decode.computes_itself = True
        answer = cluster.client.post("/v1/completions", json=COMPLETION, headers={HEADER: "decode"})
        cluster.decode.computes_itself = False
        assert answer.status_code == 200
        tokens: int = cluster.decode.received[-1].body["kv_transfer_params"]["prefill_first_tokens"]
        return tokens

    with beside(other, check_interval=0.1) as cluster, ThreadPoolExecutor(engines) as clients:
        other.metrics = cluster.prefill.metrics = holding(8192)
        eventually(lambda: first_tokens(cluster) == 8192)
        for engine in (other, cluster.prefill):
            engine.received.clear()
            engine.holds = True
        answers = []
        for busy in range(engines):
            assert told_beside(cluster, busy) == 8192, "an idle engine would begin at once"
            answers.append(clients.submit(cluster.complete, prompt=f"{busy} " * 4000))
        assert 1 <= told_beside(cluster, engines) < 8192
        other.holds = cluster.prefill.holds = False
        assert [answer.result().status_code for answer in answers] == [200] * len(answers)


def test_a_request_that_has_failed_gets_memory_before_its_prompt_is_computed() -> None:
    """An engine that does not hold prompts may have taken the place of one that has."""
    other = PrefillEngine()
    with beside(other, check_interval=0.1) as cluster:
        other.metrics = cluster.prefill.metrics = holding(512)
        eventually(lambda: first_tokens(cluster) == 512)
        cluster.decode.received.clear()
        other.transfer_error = cluster.prefill.transfer_error = "it is not held"
        assert cluster.complete().is_error
        first, *again = (received.body["kv_transfer_params"] for received in cluster.decode.received)
        assert first["prefill_first_tokens"] == 512
        assert again
        assert all("prefill_first_tokens" not in params for params in again)
