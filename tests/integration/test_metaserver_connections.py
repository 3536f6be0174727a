# SPDX-License-Identifier: Apache-2.0
"""The metaserver client's connections: posts reuse them, idle ones are closed, and no cancelled post leaves one."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import threading
import time

import msgspec
import psutil
import pytest
from metaserver_posts import *  # noqa: F403
from metaserver_posts import QUICK, Metaserver, eventually, outcome_of, outcomes, raw_server

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.decode import metaserver_http
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
from vllm_ascend_pd.transport import http_session


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
