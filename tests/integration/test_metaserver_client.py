# SPDX-License-Identifier: Apache-2.0
"""The metaserver client against real HTTP servers on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from harness.tcp_server import read_to_the_end, serving
from harness.waiting import wait_until
from vllm_ascend_pd.core.metaserver import FAILURE_SUFFIX, RECOMPUTES_HEADER, TransferFailure
from vllm_ascend_pd.core.observer import DecodeSchedulerObserver
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode import metaserver_http
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.decode.pending_posts import PostOutcome
from vllm_ascend_pd.transport import http_session

QUICK = MetaserverSettings(deadline_s=10, backoff_base_s=0.01, backoff_max_s=0.02)
HELD_BACK = 64


class Metaserver:
    """Behaves as the posted body's `do` says."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.tokens: set[str | None] = set()
        self.recomputes: str | None = None
        self.waiting = 0
        self.all_wait: asyncio.Event | None = None
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}{METASERVER_PATH}"
        self.failures: list[dict[str, object]] = []
        routes = [
            Route(METASERVER_PATH, self.answer, methods=["POST"]),
            Route(METASERVER_PATH + FAILURE_SUFFIX, self.take_failure, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_level="critical",
            timeout_keep_alive=60,  # which connections go is the client's doing
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    async def trickle(self) -> AsyncIterator[bytes]:
        for _ in range(300):
            yield b"x"
            await asyncio.sleep(0.1)

    async def take_failure(self, request: Request) -> Response:
        self.failures.append(await request.json())
        self.tokens.add(request.headers.get("authorization"))
        return Response()

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.attempts[body["id"]] += 1
        self.tokens.add(request.headers.get("authorization"))
        self.recomputes = request.headers.get(RECOMPUTES_HEADER)
        match body["do"]:
            case "ok":
                return Response("whatever")
            case "hold back":
                self.all_wait = self.all_wait or asyncio.Event()
                self.waiting += 1
                if self.waiting == HELD_BACK:
                    self.all_wait.set()
                await self.all_wait.wait()
                return Response()
            case "wait":
                await asyncio.sleep(body["seconds"])
                return Response()
            case "hang":
                await asyncio.sleep(30)
                return Response()
            case "trickle":
                return StreamingResponse(self.trickle(), media_type="text/plain")
            case "redirect":
                return RedirectResponse("http://127.0.0.1:1/v1/metaserver", status_code=307)
            case "500 once" if self.attempts[body["id"]] > 1:
                return Response()
            case "500 once":
                return Response("out of\nluck", status_code=500)
            case "prefill failed":
                return JSONResponse({"error": "out of blocks\n" + "x" * 10_000}, status_code=502)
            case "bad gateway":
                return Response("<html>bad gateway</html>", status_code=502)
            case _:
                return Response("unknown \x1b[31mid", status_code=404)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def metaserver() -> Iterator[Metaserver]:
    metaserver = Metaserver()
    yield metaserver
    metaserver.stop()


class Retries(DecodeSchedulerObserver):
    count = 0

    def post_retried(self) -> None:
        self.count += 1


@pytest.fixture
def retries() -> Retries:
    return Retries()


@pytest.fixture
def client(retries: Retries) -> Iterator[MetaserverClient]:
    client = MetaserverClient(QUICK, "127.0.0.1", retries)
    yield client
    client.close()


@contextlib.contextmanager
def raw_server(answer: bytes, reset: bool = False, until_closed: bool = False) -> Iterator[tuple[str, list[None]]]:
    """A server that sends `answer` to any request and closes the connection, or resets it (`reset`). Yields its URL and
    a list with one entry per connection. `until_closed`: the client closes connections, which adds another entry."""
    connections: list[None] = []

    def serve(peer: socket.socket) -> None:
        connections.append(None)
        peer.recv(65536)
        if reset:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        peer.sendall(answer)
        if not until_closed:
            peer.shutdown(socket.SHUT_WR)
        read_to_the_end(peer)
        if until_closed:
            connections.append(None)

    with serving(serve) as port:
        yield f"http://127.0.0.1:{port}{METASERVER_PATH}", connections


def outcomes(client: MetaserverClient, count: int, timeout_s: float = 10.0) -> list[PostOutcome]:
    got: list[PostOutcome] = []
    deadline = time.monotonic() + timeout_s
    while len(got) < count and time.monotonic() < deadline:
        got += client.poll()
        time.sleep(0.005)
    assert len(got) == count
    return got


eventually = partial(wait_until, timeout_s=20)


def outcome_of(client: MetaserverClient, url: str, do: str) -> PostOutcome:
    client.post(do, url, {"id": do, "do": do})
    [outcome] = outcomes(client, 1)
    assert outcome.key == do
    assert "\n" not in outcome.reason
    assert len(outcome.reason) < 500
    return outcome


def test_success(client: MetaserverClient, metaserver: Metaserver) -> None:
    assert outcome_of(client, metaserver.url, "ok") == PostOutcome("ok", ok=True)


def test_answers_held_back_for_many_requests_at_once(client: MetaserverClient, metaserver: Metaserver) -> None:
    started = time.monotonic()
    for i in range(HELD_BACK):
        client.post(str(i), metaserver.url, {"id": "held", "do": "hold back"})
    assert time.monotonic() - started < 0.5
    assert {outcome.key for outcome in outcomes(client, HELD_BACK) if outcome.ok} == set(map(str, range(HELD_BACK)))


@pytest.mark.parametrize(
    ("do", "attempts", "ok", "text"),
    [
        ("unknown", 1, False, "answered 404: unknown [31mid: it does not know this request"),
        ("500 once", 2, True, ""),
        ("prefill failed", 1, False, "reports that prefill failed: out of blocks"),
        ("bad gateway", 6, False, "answered 502: <html>bad gateway</html>; see the proxy's log (6 attempts)"),
        ("redirect", 1, False, "redirects are not followed"),
    ],
)
def test_answers(
    client: MetaserverClient, metaserver: Metaserver, retries: Retries, do: str, attempts: int, ok: bool, text: str
) -> None:
    outcome = outcome_of(client, metaserver.url, do)
    assert outcome.ok is ok
    assert text in outcome.reason
    assert metaserver.attempts[do] == retries.count + 1 == attempts


@pytest.mark.parametrize(
    ("answer", "connections", "text"),
    [
        (b"\x00\xffSSH-2.0 hello\r\n\r\n", 1, "does not speak HTTP"),
        (b"", 6, "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", 1, "closed the connection in the middle of its answer"),
    ],
)
def test_broken_servers(client: MetaserverClient, answer: bytes, connections: int, text: str) -> None:
    with raw_server(answer) as (url, seen):
        outcome = outcome_of(client, url, "ok")
        assert not outcome.ok
        assert text in outcome.reason
        assert len(seen) == connections


def test_a_reset_is_tried_again(client: MetaserverClient) -> None:
    with raw_server(b"", reset=True) as (url, seen):
        outcome = outcome_of(client, url, "ok")
        assert "closed the connection without an answer; did it restart? (6 attempts)" in outcome.reason
        assert len(seen) == 6


def test_endless_body_is_cut(client: MetaserverClient) -> None:
    endless = b"HTTP/1.1 400 Bad\r\nContent-Length: 100000000\r\n\r\n" + b"y" * 200_000
    with raw_server(endless) as (url, _):
        assert "answered 400: yyy" in outcome_of(client, url, "ok").reason


def test_a_redirect_and_proxies_of_the_environment_lead_nowhere(
    metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (elsewhere, seen):
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, elsewhere.removesuffix(METASERVER_PATH))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        client = MetaserverClient(QUICK, own_host="127.0.0.1")
        try:
            assert outcome_of(client, metaserver.url, "ok").ok
            moved = f"HTTP/1.1 308 Moved\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\n\r\n"
            with raw_server(moved.encode()) as (url, _):
                assert "redirects are not followed" in outcome_of(client, url, "ok").reason
        finally:
            client.close()
        assert seen == []


def test_unreachable_port(client: MetaserverClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcome = outcome_of(client, f"http://127.0.0.1:{port}{METASERVER_PATH}", "ok")
    assert "unreachable" in outcome.reason
    assert "(6 attempts)" in outcome.reason


def test_hang_past_the_deadline(metaserver: Metaserver) -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, deadline_s=0.3), own_host="127.0.0.1")
    started = time.monotonic()
    assert "did not answer within 0.3 s" in outcome_of(client, metaserver.url, "hang").reason
    assert time.monotonic() - started < 2
    client.close()


def test_read_timeout_below_the_deadline(metaserver: Metaserver) -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, read_timeout_s=0.2), own_host="127.0.0.1")
    assert "did not answer within 0.2 s" in outcome_of(client, metaserver.url, "hang").reason
    client.close()


def test_a_ticket_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket larger than the kernel's buffers, for a server that accepts and reads nothing."""
    monkeypatch.setattr(metaserver_http, "_WRITE_TIMEOUT_S", 0.3)
    client = MetaserverClient(QUICK, own_host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}{METASERVER_PATH}"
        client.post("large", url, {"id": "x" * (32 << 20)})
        [outcome] = outcomes(client, 1, timeout_s=5)
        assert "did not read the ticket within 0.3 s" in outcome.reason
        port = server.getsockname()[1]
        ours = psutil.Process().net_connections
        eventually(lambda: not [one for one in ours("tcp") if one.raddr and one.raddr.port == port])
    client.close()


def test_a_connection_that_is_not_accepted_in_time() -> None:
    """The server's backlog is full, so the kernel drops new connections."""
    settings = msgspec.structs.replace(QUICK, connect_timeout_s=0.3, retries=0)
    client = MetaserverClient(settings, own_host="127.0.0.1")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        started = time.monotonic()
        outcome = outcome_of(client, f"http://127.0.0.1:{server.getsockname()[1]}{METASERVER_PATH}", "ok")
        assert "is unreachable" in outcome.reason
        assert time.monotonic() - started < 2
    client.close()


def test_waiting_for_a_connection_counts_towards_the_deadline(metaserver: Metaserver) -> None:
    settings = msgspec.structs.replace(QUICK, deadline_s=0.5, max_connections=1)
    client = MetaserverClient(settings, own_host="127.0.0.1")
    started = time.monotonic()
    for key in "abc":
        client.post(key, metaserver.url, {"id": key, "do": "hang"})
    assert not any(outcome.ok for outcome in outcomes(client, 3))
    assert time.monotonic() - started < 1.5
    client.close()


def test_too_many_pending(metaserver: Metaserver) -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, max_pending=2), own_host="127.0.0.1")
    for key in "abc":
        client.post(key, metaserver.url, {"id": key, "do": "hang"})
    [overflow] = client.poll()
    assert overflow.key == "c"
    assert "2 posts wait already" in overflow.reason
    client.cancel("a")
    client.post("d", metaserver.url, {"id": "d", "do": "ok"})
    assert outcomes(client, 1) == [PostOutcome("d", ok=True)]
    client.close()


def test_cancelled_post_has_no_outcome_and_frees_its_key(client: MetaserverClient, metaserver: Metaserver) -> None:
    client.post("key", metaserver.url, {"id": "cancelled", "do": "hang"})
    with pytest.raises(ValueError, match="under way"):
        client.post("key", metaserver.url, {})
    client.cancel("key")
    client.cancel("never posted")
    client.post("key", metaserver.url, {"id": "again", "do": "ok"})
    assert outcomes(client, 1) == [PostOutcome("key", ok=True)]
    time.sleep(0.1)
    assert client.poll() == []


def test_failures_are_reported_beside_the_post(metaserver: Metaserver, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("told\n")
    token.chmod(0o600)
    client = MetaserverClient(msgspec.structs.replace(QUICK, token_file=str(token)), own_host="127.0.0.1")
    client.post("key", metaserver.url, {"id": "told", "do": "hang"})
    client.report_failure(metaserver.url, TransferFailure("r", "t", 1, "went silent", final=False))
    eventually(lambda: metaserver.failures)
    assert metaserver.failures == [
        {"request_id": "r", "ticket_id": "t", "attempt": 1, "reason": "went silent", "final": False}
    ]
    assert "Bearer told" in metaserver.tokens
    assert client.poll() == []
    client.close()


def test_failures_are_reported_while_posts_have_all_connections(metaserver: Metaserver) -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, max_connections=1), own_host="127.0.0.1")
    for key in ("first", "second"):
        client.post(key, metaserver.url, {"id": key, "do": "hang"})
    client.report_failure(metaserver.url, TransferFailure("r", "t", 1, "went silent", final=False))
    eventually(lambda: metaserver.failures)
    assert client.poll() == []
    client.close()


def test_failures_that_cannot_be_reported(metaserver: Metaserver, caplog: pytest.LogCaptureFixture) -> None:
    """Each is logged, and posts work as before."""
    failure = TransferFailure("r", "t", 0, "why", final=True)
    client = MetaserverClient(QUICK, own_host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with caplog.at_level("WARNING"), raw_server(b"\x00 garbage\r\n\r\n") as (url, seen):
        client.report_failure(f"http://127.0.0.1:{port}{METASERVER_PATH}", failure)
        client.report_failure(url, failure)
        client.report_failure("http://192.0.2.1/v1/metaserver", failure)  # not allowed: not even tried
        eventually(lambda: len(caplog.records) == 2)
        assert len(seen) == 2
    for record in caplog.records:
        assert record.message.startswith("request r: its failed transfer ")
        assert "cannot be reported to metaserver http://127.0.0.1:" in record.message
    assert outcome_of(client, metaserver.url, "ok").ok
    client.close()
    client.report_failure(metaserver.url, failure)


def test_a_failure_is_reported_again_if_the_connection_was_just_being_closed(client: MetaserverClient) -> None:
    heard: list[bytes] = []

    def serve(peer: socket.socket) -> None:
        said = b""
        while not said.endswith(b"}"):
            said += peer.recv(65536)
        heard.append(said)
        if len(heard) == 1:
            return
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        read_to_the_end(peer)

    with serving(serve) as port:
        failure = TransferFailure("r", "t", 0, "why", final=True)
        client.report_failure(f"http://127.0.0.1:{port}{METASERVER_PATH}", failure)
        eventually(lambda: len(heard) == 2)
        assert b"why" in heard[1]


def test_little_is_read_of_an_endless_answer_to_a_failure_report(client: MetaserverClient) -> None:
    most = 64
    taken: list[bool] = []

    def serve(peer: socket.socket) -> None:
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (most << 20))
        try:
            for _ in range(most):
                peer.sendall(b"x" * (1 << 20))
        except OSError:
            taken.append(False)
        else:
            taken.append(True)

    with serving(serve) as port:
        client.report_failure(
            f"http://127.0.0.1:{port}{METASERVER_PATH}", TransferFailure("r", "t", 0, "why", final=True)
        )
        eventually(lambda: taken)
    assert taken == [False]


def test_failure_reports_at_a_time_are_bounded() -> None:
    client = MetaserverClient(msgspec.structs.replace(QUICK, max_pending=2), own_host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}{METASERVER_PATH}"
        for _ in range(5):
            client.report_failure(url, TransferFailure("r", "t", 0, "why", final=True))
        silent.settimeout(10)
        peers = [silent.accept()[0] for _ in range(2)]
        silent.settimeout(0.5)
        with pytest.raises(TimeoutError):
            silent.accept()
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 5
        for peer in peers:
            peer.close()


def test_a_ticket_has_a_header_if_decode_recomputes(metaserver: Metaserver) -> None:
    for recomputes in (False, True):
        client = MetaserverClient(msgspec.structs.replace(QUICK, recomputes=recomputes), own_host="127.0.0.1")
        assert outcome_of(client, metaserver.url, "ok").ok
        assert metaserver.recomputes == ("1" if recomputes else None)
        client.close()


def test_idle_connections_are_closed_without_another_post(client: MetaserverClient) -> None:
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", until_closed=True) as (url, seen):
        assert outcome_of(client, url, "ok").ok
        eventually(lambda: seen == [None, None])  # one connection, and its end


def test_cancelled_posts_leave_no_connection(client: MetaserverClient) -> None:
    """Posts are cancelled while a connection is opened, and before and after its first use."""
    chance = random.Random(1)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:  # it accepts nothing, the kernel does
        port = server.getsockname()[1]
        for i in range(600):
            client.post(str(i), f"http://127.0.0.1:{port}{METASERVER_PATH}", {})
            time.sleep(chance.uniform(0, 0.004))
            client.cancel(str(i - chance.randrange(4)))
        for i in range(600):
            client.cancel(str(i))
        ours = psutil.Process().net_connections
        eventually(lambda: not [one for one in ours("tcp") if one.raddr and one.raddr.port == port])


def test_a_post_cancelled_while_old_connections_are_closed_leaves_none(
    metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector is off: it would close forgotten connections."""
    monkeypatch.setattr(http_session, "IDLE_CONNECTION_S", 0.01)
    gc.disable()
    client = MetaserverClient(QUICK, own_host="127.0.0.1")
    loop = client._loop.loop

    def cancel_after(turns: int) -> None:
        if turns:
            loop.call_soon(cancel_after, turns - 1)
        else:
            client.cancel("late")

    try:
        for turns in range(12):
            for i in range(4):
                client.post(str(i), metaserver.url, {"id": "early", "do": "wait", "seconds": 0.1})
            outcomes(client, 4)
            time.sleep(0.05)
            client.post("late", metaserver.url, {"id": "late", "do": "hang"})
            loop.call_soon_threadsafe(cancel_after, turns)
        port = metaserver.socket.getsockname()[1]
        ours = psutil.Process().net_connections
        eventually(lambda: not [one for one in ours("tcp") if one.raddr and one.raddr.port == port])
    finally:
        gc.enable()
        client.close()


def test_connections_that_posts_reuse_are_not_closed_with_expired_ones(
    metaserver: Metaserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Posts reuse three connections while others, which have expired, are being closed."""
    monkeypatch.setattr(http_session, "IDLE_CONNECTION_S", 0.6)

    def body(name: str, seconds: float) -> bytes:
        return msgspec.json.encode({"id": f"swept {name}", "do": "wait", "seconds": seconds})

    async def run() -> None:
        http = metaserver_http.MetaserverHttp(QUICK)
        waits = (*[0.0] * 8, *[0.4] * 3)
        await asyncio.gather(*(http.post(metaserver.url, body(str(i), each)) for i, each in enumerate(waits)))
        await asyncio.sleep(0.4)
        begun = [asyncio.create_task(http.post(metaserver.url, body(f"again {i}", 0.2))) for i in range(3)]
        await asyncio.gather(*begun)
        await http.close()

    asyncio.run(run())
    assert {name: number for name, number in metaserver.attempts.items() if name.startswith("swept again")} == {
        f"swept again {i}": 1 for i in range(3)
    }


def test_an_answer_that_trickles_in_ends_at_the_deadline(metaserver: Metaserver) -> None:
    """Every byte comes within the read timeout."""
    client = MetaserverClient(msgspec.structs.replace(QUICK, deadline_s=1.0), own_host="127.0.0.1")
    assert "did not answer within 1 s" in outcome_of(client, metaserver.url, "trickle").reason
    client.close()


def test_token_is_sent(metaserver: Metaserver, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    settings = msgspec.structs.replace(QUICK, token_file=str(token))
    client = MetaserverClient(settings, own_host="127.0.0.1")
    assert outcome_of(client, metaserver.url, "ok").ok
    assert "Bearer secret" in metaserver.tokens
    client.close()


def test_close_is_quick_and_leaves_no_thread(metaserver: Metaserver) -> None:
    before = set(threading.enumerate())
    client = MetaserverClient(QUICK, own_host="127.0.0.1")
    for i in range(10):
        client.post(str(i), metaserver.url.replace("127.0.0.1", "localhost"), {"id": "x", "do": "hang"})
    time.sleep(0.2)
    started = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - started < 2
    assert set(threading.enumerate()) <= before
    client.post("late", metaserver.url, {})
    assert "shutting down" in client.poll()[0].reason
