# SPDX-License-Identifier: Apache-2.0
"""HTTP to engines: the bytes sent and received, and errors without addresses."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from functools import wraps

import anyio
import pytest

from vllm_ascend_pd.proxy.http.bodies import Content
from vllm_ascend_pd.proxy.http.engine_client import (
    ConnectError,
    ConnectionLost,
    EngineClient,
    HttpError,
    ReadTimeout,
)
from vllm_ascend_pd.transport.names import HostNames

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
HEADERS = [(b"content-type", b"application/json"), (b"x-twice", b"1"), (b"x-twice", b"\xc3\xa9")]


class Peer:
    """A server that records each request and serves it by a function of the test."""

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._serve = serve
        self.requests: list[bytes] = []
        self.closed = asyncio.Event()
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await self._head(reader):
                self.requests.append(head)
                await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed.set()
            writer.close()

    @staticmethod
    async def _head(reader: asyncio.StreamReader) -> bytes:
        return await reader.readuntil(b"\r\n\r\n")


@asynccontextmanager
async def peer_of(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], **options: int
) -> AsyncIterator[tuple[Peer, EngineClient]]:
    peer = Peer(serve)
    server = await asyncio.start_server(peer.answer, "127.0.0.1", 0)
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    limits = {"connect_timeout": 2.0, "read_timeout": 2.0, **options}
    client = EngineClient(HostNames(), **limits)  # type: ignore[arg-type]
    try:
        yield peer, client
    finally:
        await client.aclose()
        server.close()


def says(data: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return serve


async def hangs_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
    raise ConnectionAbortedError


async def is_silent(*_: object) -> None:
    await anyio.sleep(60)


async def read(client: EngineClient, url: str) -> bytes:
    answer = await client.send("POST", url, HEADERS)
    try:
        return await answer.buffer(1 << 30)
    finally:
        answer.close()


def bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test in an event loop of its own, for half a minute at most."""

    @wraps(test)
    def run(**parameters: object) -> None:
        async def within() -> None:
            with anyio.fail_after(30):
                await test(**parameters)

        asyncio.run(within())

    return run


@pytest.fixture
def nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    gc.collect()
    assert not caplog.get_records("call")


@bounded
async def test_a_request_has_the_headers_it_was_given_and_no_others() -> None:
    async with peer_of(says(OK)) as (peer, client):
        assert await read(client, f"{peer.url}/v1/completions") == b"ok"
        first, *lines = peer.requests[0].decode().split("\r\n")
        assert first == "POST /v1/completions HTTP/1.1"
        assert sorted(line.lower() for line in lines if line) == sorted(
            [
                f"host: {peer.url.removeprefix('http://')}",
                "accept: */*",
                "accept-encoding: identity",
                "content-length: 0",
                "content-type: application/json",
                "x-twice: 1",
                "x-twice: é",
            ]
        )


@bounded
async def test_an_answer_comes_as_it_was_sent() -> None:
    body = b"\x1f\x8b no gzip \xff"
    head = b"HTTP/1.1 302 Found\r\nX-Twice: 1\r\nx-twice: 2\r\nLocation: /\r\nSet-Cookie: a=b\r\n"
    head += b"Content-Encoding: gzip\r\n"
    async with peer_of(says(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)) as (peer, client):
        for _ in range(2):  # the second one brings no cookie back
            answer = await client.send("GET", peer.url, [])
            assert (answer.status, [value for name, value in answer.headers if name.lower() == b"x-twice"]) == (
                302,
                [b"1", b"2"],
            )
            assert await answer.buffer(1 << 30) == body
            answer.close()
        assert [b"cookie" in request.lower() for request in peer.requests] == [False, False]


@pytest.mark.parametrize(
    ("serve", "error"),
    [
        (hangs_up, ConnectionLost),
        (is_silent, ReadTimeout),
        (says(b"SMTP 127.0.0.1\r\n\r\n"), ConnectionLost),
        (says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n127.0.0.1\r\n"), ConnectionLost),
        (says(b"HTTP/1.1 101 X\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"), ConnectionLost),
        (says(b"HTTP/1.1 099 X\r\nContent-Length: 0\r\n\r\n"), ConnectionLost),
        (says(b"HTTP/1.1 600 X\r\nContent-Length: 0\r\n\r\n"), ConnectionLost),
        (says(b"HTTP/1.1 200 OK\r\nX-A: b\x01c\r\nContent-Length: 0\r\n\r\n"), ConnectionLost),
    ],
)
@bounded
async def test_an_error_is_not_sent_again_and_names_no_address(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], error: type[HttpError]
) -> None:
    async with peer_of(serve, read_timeout=1) as (peer, client):
        with pytest.raises(error) as raised:
            await read(client, peer.url)
        assert "127.0.0.1" not in str(raised.value)
        assert len(peer.requests) == 1


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"


@pytest.mark.parametrize(
    ("garbage", "read_first"),
    [(b"zz\r\n", False), (b"zz\r\n", True), (b"2\r\nokxx", True), (b"zz\r\n2\r\nok\r\n", True)],
    ids=["before it is read", "no size", "no end of a chunk", "no size, and more"],
)
@pytest.mark.usefixtures("nothing_logged")
@bounded
async def test_an_answer_that_stops_being_http(garbage: bytes, read_first: bool) -> None:
    """After its headers, with a reader waiting or not. The error comes well before the read timeout."""
    goes_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        await goes_on.wait()
        writer.write(garbage)
        assert not await reader.read()
        raise ConnectionAbortedError

    async with peer_of(serve, read_timeout=20) as (peer, client):
        answer = await client.send("POST", peer.url, HEADERS)
        if read_first:
            assert await answer.read() == b"ok"
        goes_on.set()
        if not read_first:
            await peer.closed.wait()
            await anyio.sleep(0.1)
        with anyio.fail_after(5), pytest.raises(ConnectionLost):
            await answer.buffer(1 << 30)
        answer.close()


@pytest.mark.parametrize("breaks_off", [False, True])
@pytest.mark.usefixtures("nothing_logged")
@bounded
async def test_asyncio_logs_no_reset(breaks_off: bool) -> None:
    """A reset of a connection that was used before, while it is idle or while somebody reads from it."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        last = len(peers[0].requests) == 2
        writer.write(STREAM)
        await anyio.sleep(0.05)  # what comes at once is not watched
        if not (last and breaks_off):
            writer.write(b"0\r\n\r\n")
            await anyio.sleep(0.05)
        if last:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    peers: list[Peer] = []
    async with peer_of(serve) as (peer, client):
        peers.append(peer)
        assert await read(client, peer.url) == b"ok"
        with pytest.raises(ConnectionLost) if breaks_off else nullcontext():
            assert await read(client, peer.url) == b"ok"
        await peer.closed.wait()
        await anyio.sleep(0.1)


@bounded
async def test_a_post_on_a_connection_that_was_just_closed_is_not_sent_again() -> None:
    async def once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(peers[0].requests) > 1:
            await hangs_up(_, writer)
        writer.write(OK)

    peers: list[Peer] = []
    async with peer_of(once) as (peer, client):
        peers.append(peer)
        assert await read(client, peer.url) == b"ok"
        with pytest.raises(ConnectionLost):
            await read(client, peer.url)
        assert len(peer.requests) == 2


@bounded
async def test_a_request_that_is_not_read() -> None:
    async with peer_of(is_silent, read_timeout=1) as (peer, client):
        with pytest.raises(ReadTimeout):
            await client.send("POST", peer.url, [], Content(b"x" * (32 << 20)))


@bounded
async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with peer_of(is_silent) as (_, client):
        with pytest.raises(ConnectError, match="Connection refused") as raised:
            await client.send("POST", f"http://127.0.0.1:{port}", [])
        assert str(port) not in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"x" * (32 << 20)])
@bounded
async def test_cancelled_it_closes_the_connection_at_once(body: bytes) -> None:
    """Also while most of the request is unsent, because the engine reads nothing."""

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        began.set()
        await went_on.wait()
        while chunk := await reader.read(1 << 20):
            received.append(len(chunk))
        raise ConnectionAbortedError

    began, went_on = asyncio.Event(), asyncio.Event()
    received: list[int] = []
    async with peer_of(serve, read_timeout=60) as (peer, client), anyio.create_task_group() as tasks:
        tasks.start_soon(client.send, "POST", peer.url, [], Content(body))
        await began.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            went_on.set()
            await peer.closed.wait()
        assert not body or sum(received) < len(body)
