# SPDX-License-Identifier: Apache-2.0
"""More clients at once than the proxy serves at a time: they wait in a bounded queue for a bounded time."""

from __future__ import annotations

import asyncio
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import aiohttp
import psutil
import pytest
from engine_standin import DecodeEngine, PrefillEngine
from proxy_cluster import Cluster, eventually, proxy_process, running_cluster, running_proxy, stub_engine


def waiting(cluster: Cluster) -> int:
    requests = cluster.client.get("/status.json").json()["requests"]
    return int(requests["waiting"])


def in_flight(cluster: Cluster) -> int:
    return int(cluster.client.get("/status.json").json()["requests"]["in_flight"])


def test_a_request_that_waited_too_long_is_answered_429_with_the_time() -> None:
    with running_cluster(max_concurrent=1, queue_timeout=0.5) as cluster, cluster.holding_one():
        refused = cluster.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        reason = "the proxy serves 1 requests, 0 more wait, and this one has waited 0.5 s: retry later"
        assert refused.json()["error"]["message"] == reason


def test_clients_that_leave_free_the_slots_of_their_large_bodies() -> None:
    """Whether their bodies have arrived as a whole or in part."""
    with running_cluster(max_concurrent=1, max_waiting=4) as cluster, cluster.holding_one():
        with ExitStack() as leaving:
            for _ in range(3):
                leaving.enter_context(closing(cluster.send_only("/v1/completions", {"prompt": "x" * (30 << 20)})))
            leaving.enter_context(closing(part_of_a_body(cluster, 1 << 20)))
            eventually(lambda: (waiting(cluster), in_flight(cluster)) == (3, 2))
        eventually(lambda: (waiting(cluster), in_flight(cluster)) == (0, 1))


def part_of_a_body(cluster: Cluster, size: int) -> HTTPConnection:
    """A request whose body is `size` bytes shorter than it says."""
    connection = HTTPConnection(cluster.client.base_url.host, cluster.client.base_url.port, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(2 * size))
    connection.endheaders(b"x" * size)
    return connection


def test_a_body_that_does_not_fit_beside_others_is_503_and_small_ones_fit() -> None:
    """Those that have arrived are served, and free their room."""
    large = "x" * (900 << 10)
    with running_cluster(max_concurrent=1, max_body_mib=1, max_bodies_mib=4) as cluster, ThreadPoolExecutor(3) as pool:
        with cluster.holding_one():
            first = [pool.submit(cluster.complete, prompt=large) for _ in range(2)]
            eventually(lambda: waiting(cluster) == 2)
            for _ in range(3):
                refused = cluster.complete(prompt=large)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                reason = (
                    "the request body does not fit beside those of other requests (--max-bodies-mib 4): retry later"
                )
                assert refused.json()["error"]["message"] == reason
            small = pool.submit(cluster.complete)
            eventually(lambda: waiting(cluster) == 3)
        assert [each.result().status_code for each in (*first, small)] == [200] * 3
        assert cluster.complete(prompt=large).status_code == 200


def unread(connection: HTTPConnection) -> int:
    """How many bytes of it the proxy has not taken from the kernel."""
    port = f":{connection.sock.getsockname()[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    ends = [row for row in rows if row[1].endswith(port) or row[2].endswith(port)]
    return sum(int(queue, 16) for row in ends for queue in row[4].split(":"))


def test_a_body_takes_the_room_of_larger_ones_that_do_not_go_on() -> None:
    with (
        running_cluster(max_body_mib=1, max_bodies_mib=4) as cluster,
        # In whatever order the proxy reads these three, each fits.
        closing(part_of_a_body(cluster, 900 << 10)) as first,
        closing(part_of_a_body(cluster, 700 << 10)) as second,
        closing(part_of_a_body(cluster, 300 << 10)) as third,
    ):
        eventually(lambda: in_flight(cluster) == 3 and not any(map(unread, (first, second, third))))
        assert cluster.complete(prompt="x" * (700 << 10)).status_code == 200
        assert first.getresponse().status == 503


def test_clients_that_send_no_bodies_keep_no_place_from_others() -> None:
    with (
        running_cluster(max_concurrent=1, max_waiting=0) as cluster,
        closing(part_of_a_body(cluster, 10)),
        closing(part_of_a_body(cluster, 10)),
    ):
        eventually(lambda: in_flight(cluster) == 2)
        assert cluster.complete().status_code == 200


def test_a_body_that_is_too_large_does_not_wait() -> None:
    with running_cluster(max_concurrent=1, max_body_mib=1) as cluster, cluster.holding_one():
        refused = cluster.complete(prompt="x" * (2 << 20))
        assert refused.status_code == 413
        assert refused.json()["error"]["message"] == "the request body exceeds 1048576 bytes"


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_body_that_arrives_while_its_request_waits_is_complete(size: int) -> None:
    prompt = "".join(chr(ord("a") + number % 26) for number in range(size))
    with running_cluster(max_concurrent=1) as cluster, ThreadPoolExecutor(1) as client:
        with cluster.holding_one():
            second = client.submit(cluster.complete, prompt=prompt)
            eventually(lambda: waiting(cluster) == 1)
        assert second.result().status_code == 200
        assert cluster.decode.received[1].body["prompt"] == prompt
        assert cluster.decode.most_at_once == 1


def test_waiting_clients_get_503_when_the_proxy_stops() -> None:
    prefill, decode = PrefillEngine(), DecodeEngine()
    prefill.holds = True
    with (
        ThreadPoolExecutor(2) as clients,
        proxy_process(prefill, decode, "--max-concurrent", "1") as (process, port),
    ):
        cluster = Cluster()
        cluster.client.base_url = f"http://127.0.0.1:{port}"  # type: ignore[assignment]
        first = clients.submit(cluster.complete)
        assert decode.working.wait(10)
        second = clients.submit(cluster.complete)
        eventually(lambda: waiting(cluster) == 1)
        process.send_signal(signal.SIGTERM)
        for answer in (first, second):
            assert answer.result().status_code == 503
            assert answer.result().json()["error"]["message"] == "the proxy is shutting down"
        assert process.wait(10) == 0
        prefill.holds = False


def test_two_thousand_clients_at_once_are_all_answered() -> None:
    """The proxy has its default settings and serves half as many at a time."""
    at_once, soft_hard = 2000, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_hard[1], soft_hard[1]))

    async def ask(client: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
        async with client.post(url, json={"model": "stub", "prompt": "x", "max_tokens": 2, "stream": True}) as answer:
            return answer.status, await answer.read()

    async def ask_all(url: str) -> list[tuple[int, bytes]]:
        connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=240)
        async with aiohttp.ClientSession(connector=connector, timeout=patience) as client:
            return await asyncio.gather(*(ask(client, url) for _ in range(at_once)))

    try:
        with ExitStack() as stack:
            engines = [stack.enter_context(stub_engine(role))[1] for role in ("prefill", "decode")]
            process, port = stack.enter_context(running_proxy(*engines))
            assert process.stderr is not None
            log: list[str] = []
            reader = threading.Thread(target=log.extend, args=(process.stderr,))  # a full pipe would stop the proxy
            reader.start()
            stack.callback(reader.join, 10)
            stack.callback(process.kill)
            proxy = psutil.Process(process.pid)
            before = proxy.memory_info().rss
            answers = asyncio.run(ask_all(f"http://127.0.0.1:{port}/v1/completions"))
            grown = proxy.memory_info().rss - before
            failed = [answer for answer in answers if answer[0] != 200 or answer[1].count(b"data: ") != 3]
            assert failed == [], log[-20:]
            assert grown < 400 << 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)


def test_the_log_at_start_says_what_too_few_open_files_allow() -> None:
    few = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
    with running_proxy("http://127.0.0.1:9", "http://127.0.0.1:11", before=few) as (process, _):
        assert process.stderr is not None
        said = process.stderr.readline()
        assert "the hard limit of 1024 open files (ulimit -Hn) does not allow --max-concurrent 1024" in said
        assert said.endswith("80 requests are served at a time, and 0 others wait\n")
