# SPDX-License-Identifier: Apache-2.0
"""Clients that do not read, do not send their bodies, or ask for another protocol, over real connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

import psutil
import pytest
from engine_standin import DecodeEngine, PrefillEngine
from proxy_cluster import Cluster, eventually, proxy_process, running_cluster, running_proxy

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.proxy.http import arriving

NOBODY = "http://127.0.0.1:9", "http://127.0.0.1:11"


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    return connection


def connected(cluster: Cluster) -> socket.socket:
    port = cluster.client.base_url.port
    assert port is not None
    return connect(port)


def post(path: str, length: int, *headers: bytes) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"Host: x", b"Content-Length: %d" % length, *headers]
    return b"\r\n".join([*lines, b"", b""])


def is_answered(connection: socket.socket) -> None:
    """Sends a request, reads its answer, and keeps the connection open."""
    connection.sendall(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while not received.endswith(b"}}"):
        chunk = connection.recv(65536)
        assert chunk, "closed"
        received += chunk


def rest_of(connection: socket.socket) -> bytes:
    """The bytes until the server closes the connection."""
    received = b""
    with suppress(ConnectionError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


@contextmanager
def asked_for_8_mib(port: int, receive_buffer: int) -> Iterator[socket.socket]:
    """A connection that has sent a request whose answer takes more than the kernel's buffers: the engine echoes."""
    body = b'{"prompt": "' + b"x" * (8 << 20) + b'"}'
    with closing(connect(port, receive_buffer)) as connection:
        connection.sendall(post("/tokenize", len(body)) + body)
        yield connection


def test_a_client_that_reads_nothing_loses_its_connection_and_a_slow_one_gets_all() -> None:
    decode = DecodeEngine()
    with ExitStack() as stack:
        process, port = stack.enter_context(proxy_process(PrefillEngine(), decode, "--read-timeout", "3"))
        deaf = stack.enter_context(asked_for_8_mib(port, 1))
        slow = stack.enter_context(asked_for_8_mib(port, 1 << 16))
        proxy = psutil.Process(process.pid)

        def held(connection: socket.socket) -> bool:
            return any(each.raddr == connection.getsockname() for each in proxy.net_connections())

        eventually(lambda: len(decode.received) == 2)
        assert held(deaf)
        received = 0
        began_at = time.monotonic()
        while received < 8 << 20:  # for longer than the timeout
            chunk = slow.recv(1 << 16)
            assert chunk, "closed"
            received += len(chunk)
            time.sleep(0.05)
        assert time.monotonic() - began_at > 3
        eventually(lambda: not held(deaf))
        assert held(slow)


@pytest.mark.parametrize(
    ("path", "waits"),
    [("/v1/completions", False), ("/v1/completions", True), (METASERVER_PATH, False), ("/admin/engines", False)],
)
def test_a_body_that_does_not_arrive_is_answered_408(
    path: str, waits: bool, token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request frees its place."""
    monkeypatch.setattr(arriving, "_BODY_SECONDS", 0.5)
    with running_cluster(max_concurrent=1, admin_token_file=token_file) as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.holds = waits
        first = client.submit(cluster.complete)
        assert cluster.decode.working.wait(10)
        with closing(connected(cluster)) as connection:
            connection.sendall(post(path, 100, b"Authorization: Bearer a-secret") + b"{")
            answer = rest_of(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"the request body did not arrive" in answer
            assert answer.count(b"HTTP/1.1") == 1
        cluster.prefill.holds = False
        assert first.result().status_code == 200
        assert cluster.complete().status_code == 200


def test_a_large_body_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "_BODY_SECONDS", 2.0)
    monkeypatch.setattr(arriving, "_BYTES_PER_SECOND", 10_000)
    body = b'{"prompt": "' + b"x" * 39_986 + b'"}'
    with running_cluster() as cluster, closing(connected(cluster)) as connection:
        connection.sendall(post("/v1/completions", len(body), b"Connection: close"))
        for at in range(0, len(body), 5000):
            time.sleep(0.5)
            connection.sendall(body[at : at + 5000])
        assert rest_of(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
def test_a_body_without_end_is_cut_off_after_the_answer(path: str) -> None:
    with running_cluster(max_body_mib=1) as cluster, closing(connected(cluster)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        cut_off = False
        while not cut_off:
            try:
                connection.sendall(chunk)
            except ConnectionError:
                cut_off = True
        assert cluster.complete().status_code == 200


def test_the_answer_to_a_body_that_is_too_large_arrives() -> None:
    """Although the client sends all of it before it reads."""
    with running_cluster(max_body_mib=1) as cluster, closing(connected(cluster)) as connection:
        connection.sendall(post("/v1/completions", 32 << 20) + bytes(32 << 20))
        assert rest_of(connection).startswith(b"HTTP/1.1 413 ")


COMPLETION = b'{"prompt": "a", "max_tokens": 4}'


def test_a_client_that_sends_its_next_request_and_leaves_ends_its_first() -> None:
    """uvicorn would not notice that: it stops reading."""
    prefill, decode = PrefillEngine(), DecodeEngine()
    prefill.holds = True
    request = post("/v1/completions", len(COMPLETION)) + COMPLETION
    with proxy_process(prefill, decode) as (_, port):
        for ahead in (request, bytes(3 << 20)):  # at once, or later and more than is kept
            decode.cancelled.clear()
            decode.working.clear()
            with closing(connect(port)) as client:
                client.sendall(request + request if ahead is request else request)
                assert decode.working.wait(10)
                client.sendall(ahead)
            assert decode.cancelled.wait(10)
        prefill.holds = False


def test_a_request_that_is_sent_early_is_answered_after_the_first() -> None:
    prefill, decode = PrefillEngine(), DecodeEngine()
    decode.waits = 0.5
    request = post("/v1/completions", len(COMPLETION)) + COMPLETION
    with proxy_process(prefill, decode) as (_, port), closing(connect(port)) as client:
        client.sendall(request)
        assert decode.working.wait(10)
        client.sendall(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert rest_of(client).count(b"HTTP/1.1 200 ") == 2
        assert len(decode.received) == 2


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_an_answer_to_http_1_0_is_not_cut_into_chunks(stream: bytes) -> None:
    """It ends with the connection. nginx speaks HTTP/1.0 to the proxy unless told otherwise."""
    body = b'{"prompt": "a", "max_tokens": 4, "stream": %s}' % stream
    with proxy_process(PrefillEngine(), DecodeEngine()) as (_, port), closing(connect(port)) as client:
        client.sendall(post("/v1/completions", len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        head, answer = rest_of(client).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in head.lower()
        assert answer.startswith(b"data: " if stream == b"true" else b"{")
        assert answer.endswith(b"data: [DONE]\n\n" if stream == b"true" else b"}")


def test_a_large_body_that_stalls_is_answered_408(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it came before: all others share the memory."""
    monkeypatch.setattr(arriving, "_BODY_SECONDS", 0.5)
    with running_cluster() as cluster, closing(connected(cluster)) as connection:
        connection.sendall(post("/v1/completions", 20 << 20) + b'{"prompt": "' + bytes(10 << 20))
        connection.settimeout(5)
        assert rest_of(connection).startswith(b"HTTP/1.1 408 ")


OFFER = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")
SMUGGLED = post("/tokenize", 2) + b"{}"


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("method", ["POST", "CONNECT"])
def test_a_request_to_upgrade_is_refused_and_its_body_is_no_request(method: str, apart: bool) -> None:
    """JDK's HttpClient asks for HTTP/2 by default. uvicorn does not read the body of such a request."""
    request = post("/v1/completions", len(SMUGGLED), *OFFER).replace(b"POST", method.encode(), 1)
    with running_cluster() as cluster, closing(connected(cluster)) as connection:
        connection.sendall(request if apart else request + SMUGGLED)
        if apart:
            time.sleep(0.2)
            with suppress(ConnectionError):
                connection.sendall(SMUGGLED)
        answer = rest_of(connection)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"HTTP/1.1 alone" in answer
        assert answer.count(b"HTTP/1.1 4") == 1
        assert cluster.decode.received == []


def test_client_connection_is_reused_after_longer_than_5_s() -> None:
    """Gateways keep idle connections for a minute and more."""
    with running_proxy(*NOBODY) as (_, port), closing(connect(port)) as client:
        for wait_s in (6, 0):
            is_answered(client)
            time.sleep(wait_s)


FEW_FILES = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))"
"""For 47 connections with requests, and 32 more."""


def answer_to(port: int, path: str) -> bytes:
    with closing(connect(port)) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return rest_of(client)


def test_the_connection_that_was_idle_for_longest_is_closed_for_a_new_one() -> None:
    with running_proxy(*NOBODY, before=FEW_FILES) as (_, port), ExitStack() as stack:
        silent, with_half_a_head, answered = (stack.enter_context(closing(connect(port))) for _ in range(3))
        with_half_a_head.sendall(b"GET /metrics HTTP/1.1\r\nX-Name: ")
        busy = stack.enter_context(closing(connect(port)))
        busy.sendall(post(METASERVER_PATH, 2))
        is_answered(answered)
        for _ in range(76):  # one too many, and the next one is the second
            stack.enter_context(closing(connect(port)))
        assert answer_to(port, "/metrics").startswith(b"HTTP/1.1 200 ")
        for closed in (silent, with_half_a_head):
            assert rest_of(closed) == b""
        is_answered(answered)
        busy.sendall(b"{}")
        assert busy.recv(65536).startswith(b"HTTP/1.1 4")


def test_when_all_connections_have_requests_health_is_answered_and_others_get_503() -> None:
    with running_proxy(*NOBODY, before=FEW_FILES) as (_, port), ExitStack() as stack:
        for _ in range(47):
            stack.enter_context(closing(connect(port))).sendall(post(METASERVER_PATH, 2))
        eventually(lambda: answer_to(port, "/metrics").startswith(b"HTTP/1.1 503 "))
        for _ in range(100):  # more than there is room for, and idle
            stack.enter_context(closing(connect(port)))
        assert b'"status":"unavailable"' in answer_to(port, "/health")
