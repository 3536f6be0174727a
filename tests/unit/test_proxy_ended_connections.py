# SPDX-License-Identifier: Apache-2.0
"""What is left of a client's connection that has ended."""

import asyncio
import gc
import socket
import weakref

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from vllm_ascend_pd.proxy.http.connections import HttpConnection, OpenConnections

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("is_reset", [False, True])
def test_nothing_is_kept_of_a_connection_that_has_ended(is_reset: bool) -> None:
    """A client that closes before it has read everything resets the connection."""
    config = uvicorn.Config(app, lifespan="off", timeout_keep_alive=3900, log_config=None, ws="none")
    config.load()

    async def run() -> None:
        loop, lost = asyncio.get_running_loop(), asyncio.Event()

        class Watched(HttpConnection):
            def connection_lost(self, exc: Exception | None) -> None:
                assert isinstance(exc, ConnectionResetError) is is_reset
                super().connection_lost(exc)
                lost.set()

        def make() -> Watched:
            return Watched(OpenConnections(9), config=config, server_state=ServerState(), app_state={}, _loop=loop)

        ours, client = socket.socketpair()
        ours.setblocking(False)
        client.setblocking(False)
        _, protocol = await loop.connect_accepted_socket(make, ours)
        connection = weakref.ref(protocol)
        del protocol, _
        client.sendall(REQUEST)
        async with asyncio.timeout(10):
            answer = await loop.sock_recv(client, 1 if is_reset else 65536)
            assert answer.startswith(b"H")
            client.close()
            await lost.wait()
            await asyncio.sleep(0.01)
        gc.collect()
        assert connection() is None

    asyncio.run(run())
