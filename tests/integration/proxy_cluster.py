# SPDX-License-Identifier: Apache-2.0
"""A proxy between a client and stand-ins for vLLM engines, for the tests of the proxy."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
from engine_standin import DecodeEngine, PrefillEngine, Servers, make_failure

from harness import proxy_state
from harness.plain_http import PLAIN_HTTP
from harness.tcp_server import read_to_the_end, serving
from harness.waiting import wait_until
from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH
from vllm_ascend_pd.proxy.server import ProxyApp
from vllm_ascend_pd.proxy.settings import ProxySettings

STUB = Path(__file__).resolve().parents[2] / "benchmarks" / "helpers" / "stub_engine.py"
COMPLETION = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 8}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 8}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class Cluster:
    """A proxy, its engines, and a client of it."""

    prefill: PrefillEngine = field(default_factory=PrefillEngine)
    decode: DecodeEngine = field(default_factory=DecodeEngine)
    client: httpx.Client = field(default_factory=httpx.Client)
    prefill_url: str = ""
    decode_url: str = ""

    def send_only(self, path: str, body: dict[str, Any]) -> HTTPConnection:
        """Sends a request and returns without waiting for an answer."""
        connection = HTTPConnection(self.client.base_url.host, self.client.base_url.port, timeout=10)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def complete(self, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={**COMPLETION, **fields})

    @contextmanager
    def streaming(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        """A stream whose client has one token. Yields the request's id at engines, and what follows in the stream."""
        self.decode.hangs_after_first_token = True
        with self.client.stream("POST", "/v1/completions", json={**COMPLETION, **STREAM}) as response:
            events = response.iter_raw()  # the stream ends with its iterator
            next(events)
            yield self.decode.received[-1].headers["x-request-id"], events

    @contextmanager
    def holding_one(self) -> Iterator[None]:
        """While a completion waits for prefill. It is answered afterwards."""
        self.prefill.holds = True
        with ThreadPoolExecutor(1) as client:
            held = client.submit(self.complete)
            try:
                assert self.decode.working.wait(10)
                yield
            finally:
                self.prefill.holds = False
            assert held.result().status_code == 200

    def report_failure(self, reason: str) -> None:
        """Decode reports that the transfer of its first ticket failed."""
        failure = make_failure(self.decode.tickets[0], reason)
        assert self.client.post(METASERVER_PATH + FAILURE_SUFFIX, json=failure).status_code == 200


@contextmanager
def running_cluster(
    other_prefill: tuple[str, ...] = (),
    other_decode: tuple[str, ...] = (),
    only_prefill: tuple[str, ...] | None = None,
    list_engines: bool = True,
    prefill_engine: PrefillEngine | None = None,
    decode_engine: DecodeEngine | None = None,
    **settings: Any,
) -> Iterator[Cluster]:
    """`*_engine` stand in for the cluster's own, `other_*` engines come first in line; `only_prefill` replaces the
    cluster's own. Engines are checked once. `list_engines`: whether the proxy is told of the cluster's own."""
    settings.setdefault("check_interval", 600.0)
    cluster = Cluster(prefill_engine or PrefillEngine(), decode_engine or DecodeEngine())
    with Servers() as servers:
        prefill_url = cluster.prefill_url = servers.start(lambda _: cluster.prefill.app)
        decode_url = cluster.decode_url = servers.start(lambda _: cluster.decode.app)
        proxy_url = servers.start(
            lambda url: (
                ProxyApp(
                    ProxySettings(
                        prefill=[*(only_prefill or (*other_prefill, *([prefill_url] * list_engines)))],
                        decode=[*other_decode, *([decode_url] * list_engines)],
                        metaserver_url=url + METASERVER_PATH,
                        **settings,
                    )
                ).asgi
            )
        )
        with httpx.Client(base_url=proxy_url, timeout=30, **PLAIN_HTTP) as cluster.client:
            yield cluster


@contextmanager
def beside(
    prefill: PrefillEngine | None = None, decode: DecodeEngine | None = None, **settings: Any
) -> Iterator[Cluster]:
    """A cluster with another engine, which is asked first for each request."""
    with Servers() as others:
        first = {"other_prefill": prefill, "other_decode": decode}
        urls = {name: (others.start(lambda _, e=e: e.app),) for name, e in first.items() if e is not None}
        with running_cluster(**urls, **settings) as cluster:
            yield cluster


eventually = partial(wait_until, timeout_s=30)


def counted(cluster: Cluster) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    return proxy_state.counted(str(cluster.client.base_url))


def withheld(cluster: Cluster) -> dict[str, dict[str, str]]:
    return proxy_state.withheld(str(cluster.client.base_url))


@contextmanager
def refusing_engine() -> Iterator[str]:
    """The URL of an engine that refuses connections. No other process can take its port meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def stub_engine(role: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The benchmarks' engine, which computes nothing, in a process of its own, and its URL."""
    process = subprocess.Popen([sys.executable, str(STUB), role], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate(timeout=10)


@contextmanager
def closing_server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads a request and closes the connection. Yields its URL and requests, without health checks."""
    seen: list[bytes] = []

    def serve(peer: socket.socket) -> None:
        peer.settimeout(10)
        sent = peer.recv(1 << 20)
        if not sent.startswith(b"GET /health"):
            seen.append(sent)
        peer.shutdown(socket.SHUT_WR)
        read_to_the_end(peer)

    with serving(serve) as port:
        yield f"http://127.0.0.1:{port}", seen


def command(*options: str, before: str = "") -> list[str]:
    """`before`: Python that is run first."""
    program = (
        ["-c", f"{before}\nfrom vllm_ascend_pd.cli import main\nmain()"] if before else ["-m", "vllm_ascend_pd.cli"]
    )
    return [sys.executable, *program, "proxy", *options]


@contextmanager
def running_proxy(
    prefill: str, decode: str, *options: str, port: int = 0, before: str = ""
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A proxy process and its port. `before` as in `command`."""
    process = subprocess.Popen(
        command("--port", str(port), "--prefill", prefill, "--decode", decode, *options, before=before),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stderr is not None
        found = re.search(r"port (\d+)", process.stderr.readline())
        assert found is not None
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate(timeout=10)


@contextmanager
def proxy_process(
    prefill: PrefillEngine, decode: DecodeEngine, *options: str, **how: Any
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The same with stand-ins for its engines."""
    with Servers() as servers:
        urls = servers.start(lambda _: prefill.app), servers.start(lambda _: decode.app)
        with running_proxy(*urls, *options, **how) as running:
            yield running
