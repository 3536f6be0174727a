# SPDX-License-Identifier: Apache-2.0
"""Several proxies on the same engines, each a process of its own. They share nothing, and none needs another."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
from engine_standin import DecodeEngine, PrefillEngine, Servers
from proxy_cluster import COMPLETION, running_proxy

from harness.plain_http import PLAIN_HTTP
from vllm_ascend_pd.core.protocol import METASERVER_PATH

REQUESTS = 20
"""Through each."""


def prefilled(url: str) -> int:
    """Returns the tickets that a proxy had served."""
    text = httpx.get(f"{url}/metrics", timeout=10, **PLAIN_HTTP).text
    count = re.search(r"^vllm:kv_pd_proxy_prefill_seconds_count (\S+)$", text, re.MULTILINE)
    assert count is not None
    return int(float(count[1]))


def test_each_ticket_goes_to_the_proxy_that_waits_for_it() -> None:
    """test_proxy_process.py kills one."""
    prefill, decode = PrefillEngine(), DecodeEngine()
    with Servers() as servers, ThreadPoolExecutor(8) as pool:
        engines = servers.start(lambda _: prefill.app), servers.start(lambda _: decode.app)
        with running_proxy(*engines) as (_, first), running_proxy(*engines) as (_, second):
            urls = [f"http://127.0.0.1:{port}" for port in (first, second)]

            def ask(url: str) -> int:
                return httpx.post(f"{url}/v1/completions", json=COMPLETION, timeout=30, **PLAIN_HTTP).status_code

            assert list(pool.map(ask, urls * REQUESTS)) == [200] * 2 * REQUESTS
            assert [prefilled(url) for url in urls] == [REQUESTS, REQUESTS]
    assert decode.metaserver_answers == [(200, {"status": "ok"})] * 2 * REQUESTS
    named = {received.body["kv_transfer_params"]["metaserver"] for received in decode.received}
    assert named == {url + METASERVER_PATH for url in urls}
