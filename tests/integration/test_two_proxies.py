# SPDX-License-Identifier: Apache-2.0
"""Several proxies on the same engines, each a process of its own. They share nothing, and none needs another."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from engine_standin import DecodeEngine, PrefillEngine, Servers
from proxy_cluster import COMPLETION, eventually, running_proxy

from harness.plain_http import PLAIN_HTTP
from vllm_ascend_pd.core.protocol import METASERVER_PATH

REQUESTS = 20
"""Through each."""


class Pair:
    """Two proxies in front of one engine of each role."""

    def __init__(self) -> None:
        self.prefill, self.decode = PrefillEngine(), DecodeEngine()
        self.urls: list[str] = []

    def ask(self, proxy: int, **fields: object) -> httpx.Response:
        url = f"{self.urls[proxy]}/v1/completions"
        return httpx.post(url, json={**COMPLETION, **fields}, timeout=30, **PLAIN_HTTP)

    def prefilled(self, proxy: int) -> int:
        """Returns the tickets that a proxy had served."""
        text = httpx.get(f"{self.urls[proxy]}/metrics", timeout=10, **PLAIN_HTTP).text
        count = re.search(r"^vllm:kv_pd_proxy_prefill_seconds_count (\S+)$", text, re.MULTILINE)
        assert count is not None
        return int(float(count[1]))


@contextmanager
def running_pair() -> Iterator[tuple[Pair, list[subprocess.Popen[str]]]]:
    """Runs two proxies in front of one engine of each role. Yields them and their processes."""
    pair = Pair()
    with Servers() as servers:
        engines = servers.start(lambda _: pair.prefill.app), servers.start(lambda _: pair.decode.app)
        with running_proxy(*engines) as (first, port), running_proxy(*engines) as (second, other_port):
            pair.urls = [f"http://127.0.0.1:{each}" for each in (port, other_port)]
            yield pair, [first, second]


def test_each_ticket_goes_to_the_proxy_that_waits_for_it() -> None:
    with running_pair() as (pair, _), ThreadPoolExecutor(8) as pool:
        statuses = [answer.status_code for answer in pool.map(pair.ask, [0, 1] * REQUESTS)]
        assert [pair.prefilled(proxy) for proxy in (0, 1)] == [REQUESTS, REQUESTS]
    assert statuses == [200] * 2 * REQUESTS
    assert pair.decode.metaserver_answers == [(200, {"status": "ok"})] * 2 * REQUESTS
    named = {received.body["kv_transfer_params"]["metaserver"] for received in pair.decode.received}
    assert named == {url + METASERVER_PATH for url in pair.urls}


def test_one_is_killed_and_the_others_requests_are_served() -> None:
    with running_pair() as (pair, [killed, _]), ThreadPoolExecutor(8) as pool:
        pair.prefill.holds = True
        lost = [pool.submit(pair.ask, 0) for _ in range(3)]
        served = [pool.submit(pair.ask, 1, stream=bool(i % 2)) for i in range(3)]
        eventually(lambda: len(pair.prefill.received) == 6)
        killed.kill()
        for each in lost:
            with pytest.raises(httpx.HTTPError):
                each.result()
        assert pair.decode.cancelled.wait(10), "decode goes on with what nobody waits for"
        assert pair.prefill.cancelled.wait(10)
        pair.prefill.holds = False
        assert [each.result().status_code for each in served] == [200, 200, 200]
        assert pair.ask(1).status_code == 200
        assert pair.prefilled(1) == 4
