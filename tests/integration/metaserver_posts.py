# SPDX-License-Identifier: Apache-2.0
"""A metaserver that behaves as each post asks, servers that fail, and a client's posts with their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

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
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import Observed, Observer, PostRetried
from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH, WAITING_SUFFIX
from vllm_ascend_pd.decode import metaserver_client as metaserver_module
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.ticket_client import PostOutcome

QUICK = ConnectorConfig(transfer_timeout_s=10)

eventually = partial(wait_until, timeout_s=20)


class Metaserver:
    """Behaves as the posted body's `do` says, and answers questions about waiting tickets as `says` does."""

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.queries: list[str] = []
        self.failures: list[dict[str, object]] = []
        self.questions: list[list[str]] = []
        self.says: Callable[[list[str]], Response] = lambda _: Response(status_code=404)
        self.released = False
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}{METASERVER_PATH}"
        self._turns = {"": self.answer, FAILURE_SUFFIX: self._failure, WAITING_SUFFIX: self._question}
        routes = [Route(METASERVER_PATH + suffix, turn, methods=["POST"]) for suffix, turn in self._turns.items()]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_level="critical",
            timeout_keep_alive=60,  # which connections go is the client's doing
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.thread.start()

    async def _failure(self, request: Request) -> Response:
        self.queries.append(request.url.query)
        self.failures.append(await request.json())
        self.headers.append(dict(request.headers))
        return Response()

    async def _question(self, request: Request) -> Response:
        self.questions.append((await request.json())["ticket_ids"])
        return self.says(self.questions[-1])

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.attempts[body["id"]] += 1
        self.queries.append(request.url.query)
        self.headers.append(dict(request.headers))
        match body["do"]:
            case "ok":
                return Response("whatever", headers={"Set-Cookie": "a=b; Path=/"})
            case "hold":
                while not self.released:
                    await asyncio.sleep(0.01)
                return Response()
            case "hang":
                await asyncio.sleep(30)
                return Response()
            case "trickle":
                return StreamingResponse(self._trickle(), media_type="text/plain")
            case "redirect":
                return RedirectResponse("http://127.0.0.1:1/v1/metaserver", status_code=307)
            case "500 once" if self.attempts[body["id"]] > 1:
                return Response()
            case "500 once":
                return Response("out of\nluck", status_code=500)
            case "prefill failed":
                return JSONResponse({"error": "out of blocks\n" + "x" * 10_000, "may_follow": True}, status_code=502)
            case "bad gateway":
                return Response("<html>bad gateway</html>", status_code=502)
            case _:
                return Response("unknown \x1b[31mid", status_code=404)

    async def _trickle(self) -> AsyncIterator[bytes]:
        for _ in range(300):
            yield b"x"
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        self.released = self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture
def metaserver() -> Iterator[Metaserver]:
    metaserver = Metaserver()
    yield metaserver
    metaserver.stop()


class Retries(Observer):
    count = 0

    def on(self, event: Observed) -> None:
        self.count += isinstance(event, PostRetried)


@contextlib.contextmanager
def client_with(
    observer: Observer | None = None, recomputes: bool = False, **settings: Any
) -> Iterator[MetaserverClient]:
    client = MetaserverClient(msgspec.structs.replace(QUICK, **settings), "127.0.0.1", recomputes, observer)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metaserver_module, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def retries() -> Retries:
    return Retries()


@pytest.fixture
def client(retries: Retries) -> Iterator[MetaserverClient]:
    with client_with(retries) as client:
        yield client


@contextlib.contextmanager
def raw_server(answer: bytes, reset: bool = False, until_closed: bool = False) -> Iterator[tuple[str, list[float]]]:
    """A server that sends `answer` to any request and closes the connection, or resets it (`reset`). Yields its URL and
    the times of connections. `until_closed`: the client closes connections, which adds another entry."""
    connections: list[float] = []

    def serve(peer: socket.socket) -> None:
        connections.append(time.monotonic())
        peer.recv(65536)
        if reset:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        with contextlib.suppress(OSError):  # the client reads no more
            peer.sendall(answer)
            if not until_closed:
                peer.shutdown(socket.SHUT_WR)
            read_to_the_end(peer)
        if until_closed:
            connections.append(time.monotonic())

    with serving(serve) as port:
        yield url_of(port), connections


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}{METASERVER_PATH}"


def no_connection_is_left(port: int) -> None:
    ours = psutil.Process().net_connections
    eventually(lambda: not [one for one in ours("tcp") if one.raddr and one.raddr.port == port])


def outcomes(client: MetaserverClient, count: int, timeout_s: float = 20.0) -> list[PostOutcome]:
    got: list[PostOutcome] = []
    wait_until(lambda: got.extend(client.poll()) or len(got) >= count, timeout_s)
    assert len(got) == count
    return got


def outcome_of(client: MetaserverClient, url: str, do: str) -> PostOutcome:
    client.post(do, url, {"id": do, "do": do})
    [outcome] = outcomes(client, 1)
    assert outcome.key == do
    assert "\n" not in outcome.reason
    assert len(outcome.reason) < 500
    return outcome
