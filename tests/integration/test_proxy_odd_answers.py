# SPDX-License-Identifier: Apache-2.0
"""Responses that vLLM would not send, from decode engines or from proxies before them."""

from __future__ import annotations

import socket

import httpx
import pytest
from engine_standin import INTERNAL_ERROR, DecodeEngine, event
from proxy_cluster import beside, counted, running_cluster

from harness.tcp_server import serving

END = b"data: [DONE]\n\n"
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


def relayed(answer: bytes, stream: bool = False) -> httpx.Response:
    """What a client gets where a decode engine gives this answer to every request."""

    def serve(peer: socket.socket) -> None:
        peer.settimeout(10)
        peer.recv(1 << 20)
        peer.sendall(answer)
        peer.shutdown(socket.SHUT_WR)

    with serving(serve) as port, running_cluster(other_decode=(f"http://127.0.0.1:{port}",), attempts=1) as cluster:
        return cluster.complete(stream=stream)


def test_an_unknown_status_is_passed_on() -> None:
    with running_cluster(attempts=2) as cluster:
        cluster.decode.refusal = (520, INTERNAL_ERROR)
        response = cluster.complete()
        assert response.status_code == 502
        assert "it failed before it posted any ticket here" in response.json()["error"]["message"]
        cluster.decode.refusal = (529, {"error": {"message": "overloaded"}})
        response = cluster.complete()
        assert (response.status_code, response.json()) == (529, cluster.decode.refusal[1])


def test_an_unknown_status_in_a_stream() -> None:
    with running_cluster(attempts=1) as cluster:
        cluster.decode.needs_prefill = False
        cluster.decode.first_events = [{"error": {"message": "Internal server error", "code": 529}}]
        assert cluster.complete(stream=True).status_code == 502


def test_an_endless_error_is_cut() -> None:
    with running_cluster(attempts=1) as cluster:
        cluster.decode.refusal = (500, {"error": {"message": "x" * 1_500_000}})
        response = cluster.complete()
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "decode engine: HTTP 500 with a body of more than 1048576 bytes"


def test_a_response_that_is_not_passed_on() -> None:
    """test_engine_client.py has what else is not HTTP."""
    response = relayed(b"HTTP/1.1 600 X\r\nContent-Length: 2\r\n\r\n{}")
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "decode engine: ConnectionLost: the answer is not valid HTTP"


def test_a_stream_with_a_content_length() -> None:
    """The client gets an error event when the stream breaks off."""
    token = event({"choices": [{"index": 0, "text": "a"}]})
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
    response = relayed(head % (len(token) + 10) + token, stream=True)
    assert "content-length" not in response.headers
    assert response.content.startswith(token)
    assert "the answer broke off" in response.text.removeprefix(token.decode())


@pytest.mark.parametrize("events", [b"", END, event(ROLE) + END], ids=["none", "end", "role"])
def test_a_stream_that_ends_without_an_answer(events: bytes) -> None:
    """vLLM 0.30 ends one like this if its transfer has failed."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
    response = relayed(head % len(events) + events, stream=True)
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "decode engine: its stream ended without an answer"


SECRET = b"http://10.0.0.7:8100"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: %s/x\r\nContent-Length: 0\r\n\r\n" % SECRET,
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n",
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % SECRET,
        *(
            b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (kind, len(body), body)
            for kind, body in (
                (b"text/plain", b"hello from " + SECRET),
                (b"application/json", b"{}"),
                (b"application/json", b""),
                (b"application/json", b'{"choices": []}'),
                (b"application/json", b'{"detail": "%s"}' % (SECRET * 9)),
                (b"text/plain", SECRET * 9000),
            )
        ),
    ],
)
def test_a_success_without_an_answer_is_a_failure(answer: bytes) -> None:
    """Of another server at the address, or a gateway. Its words stay here."""
    response = relayed(answer)
    assert response.status_code == 502
    assert response.json()["error"]["message"].startswith("decode engine: HTTP ")
    assert SECRET.decode() not in f"{response.headers} {response.text}"


@pytest.mark.parametrize(("body", "status"), [(b"hello", 502), (b"", 502), (b'{"tokens": [1]}', 200)])
def test_routes_that_decode_answers_alone_answer_in_json(body: bytes, status: int) -> None:
    def serve(peer: socket.socket) -> None:
        peer.settimeout(10)
        peer.recv(1 << 20)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        peer.shutdown(socket.SHUT_WR)

    with serving(serve) as port, running_cluster(other_decode=(f"http://127.0.0.1:{port}",), attempts=1) as cluster:
        assert cluster.client.post("/tokenize", json={"prompt": "a"}).status_code == status


def test_another_engine_answers_where_one_answers_without_an_answer() -> None:
    odd = DecodeEngine()
    odd.refusal = (200, {})
    with beside(decode=odd) as cluster:
        assert cluster.complete().status_code == 200
        assert counted(cluster)[1]["decode"] == {"unusable answer": 1}
