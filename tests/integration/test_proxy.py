# SPDX-License-Identifier: Apache-2.0
"""The proxy over real HTTP, between clients and stand-ins for vLLM engines."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from engine_standin import DecodeEngine, PrefillEngine, Received, Servers, make_ticket
from proxy_cluster import CHAT, COMPLETION, STREAM, Cluster, refusing_engine, running_cluster

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.proxy.rendezvous import metaserver

UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.fixture
def refusing_url() -> Iterator[str]:
    with refusing_engine() as url:
        yield url


# --- a request that works ---------------------------------------------------------------------------------


def test_prefill_runs_one_token_under_the_ticket(cluster: Cluster) -> None:
    extras = {"n": 1, "min_tokens": 4, "logprobs": 3, "echo": True, "seed": 2**62 + 1, "temperature": 0.1}
    assert cluster.complete(**STREAM, **extras, max_completion_tokens=8).status_code == 200
    (at_decode,), (at_prefill,) = cluster.decode.received, cluster.prefill.received
    assert at_prefill.body == {
        "model": "tiny",
        "prompt": COMPLETION["prompt"],
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "seed": 2**62 + 1,
        "temperature": 0.1,
        "kv_transfer_params": make_ticket(f"cmpl-{at_decode.headers['x-request-id']}-0", "ticket-0"),
    }


@pytest.mark.parametrize(
    ("prompt", "prefilled"),
    [
        ("one text", ["one text"]),
        (["one text"], ["one text"]),
        (["a", "b", "c"], ["a", "b", "c"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3], [4, 5]], [[1, 2], [3], [4, 5]]),
    ],
)
def test_each_prompt_is_prefilled_by_itself(cluster: Cluster, prompt: Any, prefilled: list[Any]) -> None:
    response = cluster.complete(prompt=prompt)
    assert response.status_code == 200
    assert len(response.json()["choices"]) == len(prefilled)
    by_index = {
        int(received.body["kv_transfer_params"]["request_id"].rsplit("-", 1)[1]): received.body["prompt"]
        for received in cluster.prefill.received
    }
    assert [by_index[i] for i in range(len(prefilled))] == prefilled
    assert cluster.decode.received[0].body["prompt"] == prompt


class NamingDecode(DecodeEngine):
    """Names its answers as vLLM does."""

    def _tokens(self, received: Received) -> list[dict[str, Any]]:
        name = "cmpl-" if received.path == "/v1/completions" else "chatcmpl-"
        return [{"id": name + received.headers["x-request-id"], **token} for token in super()._tokens(received)]


@pytest.mark.parametrize(
    ("path", "body", "name"), [("/v1/completions", COMPLETION, "cmpl-"), ("/v1/chat/completions", CHAT, "chatcmpl-")]
)
@pytest.mark.parametrize("stream", [{}, STREAM], ids=["json", "stream"])
@pytest.mark.parametrize("given", ["abc", "6ba7b810-9dad-41d1-80b4-00c04fd430c8", "x" * 300])
def test_an_answer_is_named_after_the_clients_request_id(
    path: str, body: dict[str, Any], name: str, stream: dict[str, Any], given: str
) -> None:
    """As by a single engine. Engines get another id. Very long ones are not repeated."""
    with running_cluster(decode_engine=NamingDecode()) as cluster:
        response = cluster.client.post(path, json={**body, **stream}, headers={"X-Request-Id": given})
        assert response.status_code == 200
        at_engines = cluster.decode.received[0].headers["x-request-id"]
        assert UUID.fullmatch(at_engines)
        assert at_engines != given
        assert response.headers.get_list("x-request-id") == [given]
        [named] = re.findall(r'"id": ?"([^"]*)"', response.text)
        assert named == name + (given if len(given) < 300 else at_engines)
        if not stream:
            assert response.headers.get("content-length") == (None if given == "abc" else str(len(response.content)))


def test_hop_by_hop_headers_stop_at_the_proxy(cluster: Cluster) -> None:
    headers = {"Connection": "keep-alive, X-Mine", "X-Mine": "1", "X-Kept": "2", "TE": "trailers"}
    cluster.client.post("/v1/completions", json=COMPLETION, headers=headers)
    for received in (cluster.decode.received[0], cluster.prefill.received[0]):
        assert received.headers["x-kept"] == "2"
        assert not {"x-mine", "te"} & received.headers.keys()


def test_models_come_from_a_decode_engine_also_without_the_answer(cluster: Cluster) -> None:
    for _ in range(2):  # also on a connection that had one before
        response = cluster.client.head("/v1/models")
        whole = cluster.client.get("/v1/models", headers={"Authorization": "Bearer secret"})
        assert whole.json()["data"][0]["id"] == "tiny"
        assert cluster.decode.received[-1].headers["authorization"] == "Bearer secret"
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers["content-length"] == whole.headers["content-length"]


# --- engines that fail ------------------------------------------------------------------------------------


def test_decode_gets_the_reason_of_a_failed_prefill(cluster: Cluster) -> None:
    """Decode is already answering prompt 0 when prompt 1 fails: decode ends the stream itself."""
    cluster.prefill.transfer_error = "rank 1: session lost"
    cluster.decode.needs_prefill = False
    with cluster.streaming() as (request_id, _):
        answer = cluster.client.post(METASERVER_PATH, json=make_ticket(f"cmpl-{request_id}-0", "t"))
        assert (answer.status_code, answer.json()) == (502, {"error": "rank 1: session lost", "may_follow": True})
        assert not cluster.decode.cancelled.is_set()


def test_unreachable_engines_are_passed_over(refusing_url: str) -> None:
    elsewhere = refusing_url.replace("127.0.0.1", "localhost")
    with running_cluster(other_prefill=(refusing_url,), other_decode=(elsewhere,)) as cluster:
        for _ in range(2):
            assert cluster.complete().status_code == 200


# --- clients that leave or ask for too much ---------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_client_leaving_during_prefill_cancels_both_engines(cluster: Cluster, stream: bool) -> None:
    cluster.prefill.hangs = True
    with closing(cluster.send_only("/v1/completions", {**COMPLETION, "stream": stream})):
        assert cluster.prefill.working.wait(5)
    assert cluster.prefill.cancelled.wait(5)
    assert cluster.decode.cancelled.wait(5)


def test_the_clients_own_request_id_is_not_logged(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """It may be of any length, and contain line breaks and terminal control characters."""
    cluster.decode.hangs = True
    body = json.dumps(COMPLETION).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    with caplog.at_level("INFO"):
        address = (cluster.client.base_url.host, cluster.client.base_url.port)
        with socket.create_connection(address) as client:
            client.sendall(head + b"X-Request-Id: mine\x85a forged line\x9b31m" + b"x" * 20_000 + b"\r\n\r\n" + body)
            assert cluster.decode.working.wait(10)
        assert cluster.decode.cancelled.wait(10)
        said = [record.getMessage() for record in caplog.records if "the client left" in record.getMessage()]
    request_id = cluster.decode.received[0].headers["x-request-id"]
    assert said == [f"request {request_id}: the client left: ending its requests to engines"]


def test_client_leaving_in_the_stream_cancels_decode(cluster: Cluster) -> None:
    with cluster.streaming():
        assert not cluster.decode.cancelled.is_set()
    assert cluster.decode.cancelled.wait(5)


def test_failed_prefill_cancels_decode_and_the_other_prefills() -> None:
    failing = PrefillEngine()
    failing.transfer_error = "session lost"
    with (
        Servers() as others,
        running_cluster(other_prefill=(others.start(lambda _: failing.app),), attempts=1) as cluster,
    ):
        cluster.prefill.hangs = True
        assert cluster.complete(prompt=["a", "b"]).status_code == 503
        assert cluster.decode.cancelled.wait(5)
        # The failure may come before the other prefill was even sent.
        assert not cluster.prefill.working.is_set() or cluster.prefill.cancelled.wait(5)


def test_decode_giving_up_a_ticket_cancels_its_prefill(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaserver, "_REJOIN_SECONDS", 0.2)
    cluster.prefill.hangs = True
    cluster.decode.needs_prefill = False
    with cluster.streaming() as (request_id, _):
        with closing(cluster.send_only(METASERVER_PATH, make_ticket(f"cmpl-{request_id}-0", "t"))):
            assert cluster.prefill.working.wait(5)
        assert cluster.prefill.cancelled.wait(5)
        assert not cluster.decode.cancelled.is_set()


# --- operation --------------------------------------------------------------------------------------------


def test_health_lists_every_engine(refusing_url: str) -> None:
    with running_cluster(other_prefill=(refusing_url,)) as cluster:
        response = cluster.client.get("/health")
        assert response.status_code == 200
        states = response.json()
        assert states["prefill"].pop(refusing_url).startswith("new: ConnectError")
        healthy = {"prefill": {cluster.prefill_url: "healthy"}, "decode": {cluster.decode_url: "healthy"}}
        assert states == {"status": "degraded", **healthy, "problems": []}


def test_health_needs_both_roles() -> None:
    engine = DecodeEngine()
    engine.healthy = False
    with running_cluster(decode_engine=engine, eject_after=1) as cluster:
        response = cluster.client.get("/health")
        assert (response.status_code, response.json()["status"]) == (503, "unavailable")
        assert list(response.json()["decode"].values()) == ["ejected: HTTP 503"]
