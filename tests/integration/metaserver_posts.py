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
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from harness.tcp_server import read_to_the_end, serving
from harness.waiting import wait_until
from vllm_ascend_pd.core.metaserver import FAILURE_SUFFIX, RECOMPUTES_HEADER
from vllm_ascend_pd.core.observer import DecodeSchedulerObserver
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.decode.metaserver_settings import MetaserverSettings
from vllm_ascend_pd.decode.pending_posts import PostOutcome

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
