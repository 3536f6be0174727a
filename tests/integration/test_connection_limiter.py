# SPDX-License-Identifier: Apache-2.0
"""Clients that do not read their answers, or send requests without end, over real connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http import HTTPStatus

import anyio
import psutil
import pytest
import uvicorn
from engine_standin import DecodeEngine, PrefillEngine, Servers
from proxy_cluster import eventually, running_proxy
from starlette.types import Receive, Scope, Send

from harness.ports import reserve_port
from vllm_ascend_pd.proxy.http import connection_limiter as limiter_module
from vllm_ascend_pd.proxy.http.connection_limiter import ConnectionLimiter


class App:
    """`/held` is answered once `go` is set, any other path at once, with `size` bytes."""

    def __init__(self, size: int = 2) -> None:
        self.go = threading.Event()
        self.left = threading.Event()
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.body = b""
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(scope["path"])
        while (message := await receive())["type"] == "http.request":
            self.body += message["body"]
            if not message["more_body"]:
                break
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, receive)
            while scope["path"] == "/held" and not self.go.is_set() and not self.left.is_set():
                await anyio.sleep(0.01)
            length = str(self._size).encode()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
            await send({"type": "http.response.body", "body": bytes(self._size)})
            tasks.cancel_scope.cancel()
        self.ended.append(scope["path"])

    async def _watch(self, receive: Receive) -> None:
        if (await receive())["type"] == "http.disconnect":
            self.left.set()


@contextmanager
def serving(
    app: App, unread_timeout: float = 60.0, limit: int = 100, idle: int = 100
) -> Iterator[tuple[ConnectionLimiter, int]]:
    limiter = ConnectionLimiter(limit, idle, unread_timeout)
    config = uvicorn.Config(
        app,
        http=limiter.protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=60,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel takes some KB of an answer
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield limiter, listener.getsockname()[1]
        finally:
            app.go.set()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    return connection


def get(path: str, header: bytes = b"") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n".encode() + header + b"\r\n"


def answered(connection: socket.socket) -> bool:
    """Whether the whole answer of the app arrives. Headers and body may arrive separately."""
    received = b""
    while not received.endswith(b"\r\n\r\n" + bytes(2)) and (chunk := connection.recv(65536)):
        received += chunk
    return received.startswith(b"HTTP/1.1 200 OK")


def rest_of(connection: socket.socket) -> bytes:
    """The bytes until the server closes the connection."""
    received = b""
    with suppress(ConnectionError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


@pytest.mark.parametrize("closes", [False, True], ids=["keep-alive", "close"])
@pytest.mark.parametrize("size", [60_000, 1_000_000])
def test_an_unread_answer_is_dropped(size: int, closes: bool) -> None:
    """One answer that fits the server's buffer, and one that makes the application wait."""
    app = App(size)
    with serving(app, unread_timeout=0.5) as (limiter, port), closing(connect(port, receive_buffer=1)) as connection:
        connection.sendall(get("/", b"Connection: close\r\n" if closes else b""))
        eventually(lambda: app.begun)
        eventually(lambda: limiter.connections == 0)
        assert len(rest_of(connection)) < size
        assert not limiter.refused


def test_slow_reader_gets_all_of_its_answer() -> None:
    size = 1_000_000
    with serving(App(size), unread_timeout=30.0) as (_, port), closing(connect(port, 4096)) as connection:
        connection.sendall(get("/"))
        received = b""
        while len(received) < size:
            received += connection.recv(4096)
        assert received.count(b"\0") == size


def test_one_request_may_be_sent_ahead() -> None:
    app = App()
    with serving(app) as (_, port), closing(connect(port)) as connection:
        connection.sendall(get("/held") + get("/second"))
        eventually(lambda: app.begun)
        app.go.set()
        received = b""
        while received.count(b"200 OK") < 2:
            received += connection.recv(65536)
        assert app.begun == ["/held", "/second"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_disconnect_is_noticed(ahead: int) -> None:
    app = App()
    with serving(app) as (_, port):
        with closing(connect(port)) as connection:
            connection.sendall(get("/held") + get("/second") * ahead)
            eventually(lambda: app.begun)
        eventually(app.left.is_set)


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
NO_REQUEST = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_request_to_upgrade_is_answered_over_http_1(chunked: bool, apart: bool) -> None:
    """JDK's HttpClient asks for HTTP/2 by default. Its body and its next request are read as usual."""
    app = App()
    length = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(NO_REQUEST)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(NO_REQUEST), NO_REQUEST) if chunked else NO_REQUEST
    request = b"POST /first HTTP/1.1\r\nHost: x\r\n" + OFFER + length + b"\r\n" + body
    pieces = [request + get("/second", OFFER)]
    if apart:
        pieces = [request[at : at + 30] for at in range(0, len(request), 30)] + [get("/second", OFFER)]
    with serving(app) as (_, port), closing(connect(port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.02)
        eventually(lambda: len(app.ended) == 2, timeout_s=5)
        assert (app.begun, app.body) == (["/first", "/second"], NO_REQUEST)


def test_a_disconnect_after_a_request_to_upgrade_is_noticed() -> None:
    app = App()
    with serving(app) as (_, port):
        with closing(connect(port)) as connection:
            connection.sendall(get("/held", OFFER))
            eventually(lambda: app.begun)
            connection.sendall(get("/second"))
            time.sleep(0.2)  # until it is read
        eventually(app.left.is_set, timeout_s=5)


def test_connect_is_refused() -> None:
    app = App()
    with serving(app) as (_, port), closing(connect(port)) as connection:
        connection.sendall(b"CONNECT /first HTTP/1.1\r\nHost: x\r\nContent-Length: 38\r\n\r\n" + NO_REQUEST)
        assert rest_of(connection).startswith(b"HTTP/1.1 400 ")
        assert app.begun == []


@pytest.mark.parametrize("size", [100_000, 400_000])
def test_a_disconnect_is_noticed_after_the_body_of_a_request_sent_ahead(size: int) -> None:
    """Whether the body is complete or not. uvicorn itself stops reading after 64 KiB."""
    app = App()
    with serving(app) as (limiter, port):
        with closing(connect(port)) as connection:
            connection.sendall(get("/held"))
            eventually(lambda: app.begun)
            head = b"POST /second HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (size * 2)
            connection.sendall(head + bytes(size))
            time.sleep(0.2)  # until it is read
        eventually(app.left.is_set, timeout_s=5)
        assert not limiter.refused


def test_a_large_request_sent_ahead_is_refused() -> None:
    app = App()
    with serving(app) as (limiter, port), closing(connect(port)) as connection:
        connection.sendall(get("/held"))
        eventually(lambda: app.begun)
        with suppress(ConnectionError):
            connection.sendall(b"POST /second HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + bytes(10**6))
        eventually(app.left.is_set, timeout_s=5)
        assert limiter.refused == {HTTPStatus.BAD_REQUEST: 1}


def test_a_connection_that_reads_its_answer_is_not_closed_for_others() -> None:
    app = App(size := 300_000)
    with serving(app, limit=1) as (_, port), closing(connect(port, 4096)) as reader:
        reader.sendall(get("/"))
        received = b""
        while not app.ended:  # from here on the server has the rest of the answer
            received += reader.recv(4096)
        with closing(connect(port)) as newcomer:
            assert b"503" in rest_of(newcomer)
        while len(received) < size:
            received += reader.recv(4096)
        assert received.count(b"\0") == size


def test_idle_connection_is_kept_beyond_the_time_for_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for headers starts again with the first byte of another request."""
    monkeypatch.setattr(limiter_module, "_REQUEST_SECONDS", 1.0)
    app = App()
    with serving(app) as (limiter, port), closing(connect(port)) as connection:
        for _ in range(2):
            connection.sendall(get("/"))
            assert answered(connection)
            time.sleep(2.0)
        assert (len(app.ended), limiter.connections) == (2, 1)
        connection.sendall(b"GET / HTTP/1.1\r\n")
        eventually(lambda: limiter.connections == 0, timeout_s=10)
        assert limiter.refused == {HTTPStatus.REQUEST_TIMEOUT: 1}


@pytest.mark.parametrize("bound", [{"limit": 2}, {"idle": 2}], ids=["all", "idle"])
def test_the_connection_that_is_idle_longest_is_closed_for_another(bound: dict[str, int]) -> None:
    with ExitStack() as stack:
        limiter, port = stack.enter_context(serving(App(), **bound))
        clients = []
        for _ in range(2):
            clients.append(stack.enter_context(closing(connect(port))))
            clients[-1].sendall(get("/"))
            assert answered(clients[-1])
        clients[0].sendall(get("/"))  # now the other one is idle longest
        assert answered(clients[0])
        newcomer = stack.enter_context(closing(connect(port)))
        newcomer.sendall(get("/"))
        assert answered(newcomer)
        assert rest_of(clients[1]) == b""
        clients[0].sendall(get("/"))
        assert answered(clients[0])
        assert limiter.connections == 2


def test_idle_connections_stay_bounded_when_many_requests_end() -> None:
    app = App()
    with serving(app, idle=2) as (limiter, port), ExitStack() as stack:
        for number in range(5):
            client = stack.enter_context(closing(connect(port)))
            client.sendall(get("/held"))
            eventually(lambda number=number: len(app.begun) > number)
        assert limiter.connections == 5
        app.go.set()
        eventually(lambda: len(app.ended) == 5)
        eventually(lambda: limiter.connections == 2)


def test_endless_requests_sent_ahead_are_refused() -> None:
    with serving(App()) as (limiter, port), closing(connect(port)) as connection:
        reader = threading.Thread(target=rest_of, args=(connection,))
        reader.start()
        with pytest.raises(ConnectionError):
            connection.sendall(get("/") * 400_000)
        reader.join(30)
        assert not reader.is_alive()
        assert limiter.refused.total() == 1


def test_the_proxy_closes_the_connection_of_a_client_that_does_not_read() -> None:
    decode = DecodeEngine()
    with Servers() as servers:
        urls = servers.start(lambda _: PrefillEngine().app), servers.start(lambda _: decode.app)
        with running_proxy(*urls, "--read-timeout", "5") as (process, port), closing(connect(port, 1)) as connection:
            proxy = psutil.Process(process.pid)

            def held() -> list[object]:
                ours = connection.getsockname()
                return [each for each in proxy.net_connections() if each.raddr == ours]

            body = b'{"prompt": "' + b"x" * (8 << 20) + b'"}'
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: decode.received)
            assert held()
            eventually(lambda: not held())


def test_client_connection_is_reused_after_longer_than_5_s() -> None:
    """Gateways keep idle connections for a minute and more. The metaserver's own port is no different."""
    nobody = "http://127.0.0.1:9", "http://127.0.0.1:11"
    metaserver_port = reserve_port()
    with running_proxy(*nobody, "--metaserver-port", str(metaserver_port)) as (_, port), ExitStack() as stack:
        clients = [stack.enter_context(closing(connect(each))) for each in (port, metaserver_port)]
        for wait_s in (6, 0):
            for client in clients:
                client.sendall(get("/nowhere"))
                received = b""
                while b"Not Found" not in received:
                    chunk = client.recv(65536)
                    assert chunk, "closed"
                    received += chunk
            time.sleep(wait_s)
