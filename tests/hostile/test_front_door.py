# SPDX-License-Identifier: Apache-2.0
"""The proxy behind the gateway of examples/gateway, under hostile connections: it serves clients, and keeps nothing of
the others. What the proxy bounds by itself is in tests/integration/test_proxy_connections.py."""

import contextlib
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from test_listeners import attack, many

from harness.gateway import needs_nginx, running_nginx
from harness.plain_http import PLAIN_HTTP
from harness.ports import release_port, reserve_port
from harness.waiting import wait_for

pytestmark = [pytest.mark.timeout(3600), needs_nginx]  # the long form takes long

PATIENCE_S = 90.0
MAX_GROWTH_BYTES = 200 << 20
"""For three bodies of 64 MiB, the largest allowed, while they are refused, and for 4096 connections."""


class Proxy:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "vllm_ascend_pd.cli", "proxy", "--port", "0"]
        engines = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:11"]  # nobody listens there
        self._process = subprocess.Popen([*command, *engines], stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        found = re.search(r"port (\d+)", self._process.stderr.readline())
        assert found is not None
        self.port = self.own_port = int(found[1])
        """Where clients connect."""
        self.process = psutil.Process(self._process.pid)
        self.client = httpx.Client(timeout=PATIENCE_S, **PLAIN_HTTP)

    def serves(self) -> None:
        """Both a new and a known connection get the application's answer: no engine can be reached."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with httpx.Client(timeout=PATIENCE_S, **PLAIN_HTTP) as new:
                    for client in (self.client, new):
                        answer = client.get(f"http://127.0.0.1:{self.port}/v1/models")
                        assert answer.status_code == 502
                        assert "decode engine" in answer.json()["error"]["message"]
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline

    def files(self) -> int:
        return int(self.process.num_fds())

    def stop(self) -> str:
        """Stops the process. Returns its log."""
        self.client.close()
        self._process.send_signal(signal.SIGTERM)
        _, log = self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0, log
        return log


@pytest.fixture
def alone() -> Iterator[Proxy]:
    proxy = Proxy()
    proxy.serves()
    files, rss = proxy.files(), proxy.process.memory_info().rss
    yield proxy
    proxy.port = proxy.own_port
    proxy.serves()
    wait_for(proxy.files, lambda now: now <= files + 2, PATIENCE_S, every_s=0.1)
    growth = proxy.process.memory_info().rss - rss
    print(f"memory {rss >> 20} MiB, {growth / (1 << 20):+.1f} MiB; {files} -> {proxy.files()} files")
    assert growth < MAX_GROWTH_BYTES
    log = proxy.stop()
    assert "Traceback" not in log
    assert len(log) < 100_000


@pytest.fixture
def proxy(alone: Proxy, tmp_path: Path) -> Iterator[Proxy]:
    """Behind the gateway. All attackers, and the client, have one address here."""
    clients, for_decode = reserve_port(), reserve_port()
    changes = {
        "listen 443 ssl": f"listen 127.0.0.1:{clients}",
        "listen 8443 ssl": f"listen 127.0.0.1:{for_decode}",
        "limit_conn pd_per_address 256": "limit_conn pd_per_address 8192",
        "ssl_certificate /etc/pd/gateway.pem;": "",
        "ssl_certificate_key /etc/pd/gateway-key.pem;": "",
        "ssl_client_certificate /etc/pd/engines-ca.pem;": "",
        "ssl_verify_client on;": "",
    }
    with running_nginx(tmp_path, alone.own_port, (clients, for_decode), changes):
        alone.port = clients
        yield alone
    release_port(clients)
    release_port(for_decode)


@pytest.mark.parametrize("kind", ["scan", "greetings"])
def test_strangers_that_connect_and_leave(proxy: Proxy, kind: str, inputs: int, fuzz_seed: int) -> None:
    with attack(kind, proxy.port, many(inputs, 1500), fuzz_seed) as finish:
        for _ in range(3):
            proxy.serves()
        finish(wait=True)


def test_ten_thousand_connections_at_once(proxy: Proxy) -> None:
    with attack("flood", proxy.port, 10_000) as finish:
        for _ in range(3):
            proxy.serves()
        assert proxy.files() < 7000
        assert finish() >= 10_000


def test_slow_connections(proxy: Proxy) -> None:
    """All of them are closed in the end, whatever they have sent."""
    with attack("drip", proxy.port, 500) as finish:
        for _ in range(3):
            proxy.serves()
        assert finish() >= 500


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n", b"X-A: " + b"b" * 60_000 + b"\r\n", 400),
        (b"GET /", b"x" * 65536, 414),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n", b"x" * (1 << 20), 413),
    ],
    ids=["endless-headers", "endless-url", "body"],
)
def test_requests_that_are_too_long_end_at_the_gateway(proxy: Proxy, head: bytes, body: bytes, status: int) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE_S) as connection:
            connection.sendall(head)
            answer, rest = b"", body
            connection.setblocking(False)
            deadline = time.monotonic() + PATIENCE_S
            with contextlib.suppress(ConnectionError):
                while True:  # until it is cut
                    assert time.monotonic() < deadline
                    readable, writable, _ = select.select([connection], [connection], [], 1.0)
                    if writable:
                        rest = rest[connection.send(rest) :] or body
                    if readable:
                        answer += (taken := connection.recv(65536))
                        if not taken:
                            break
            # A reset, of who goes on sending, may overtake the last words.
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()) or (status in (400, 414) and not answer), answer[
                :200
            ]
        proxy.serves()
