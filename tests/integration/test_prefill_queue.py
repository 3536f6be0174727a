# SPDX-License-Identifier: Apache-2.0
"""Tickets that wait in a queue for prefill: the real client of decode's scheduler, a real proxy, engines' stand-ins."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anyio
import httpx
import pytest
from engine_standin import DecodeEngine, PrefillEngine, Received, Servers, make_ticket
from proxy_cluster import COMPLETION, Cluster, beside, eventually, running_cluster, running_proxy
from starlette.responses import Response

from harness.plain_http import PLAIN_HTTP
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.decode.metaserver import MetaserverClient
from vllm_ascend_pd.decode.ticket_client import PostOutcome

DEADLINE_S = 4.0
CONFIG = ConnectorConfig(transfer_timeout_s=DEADLINE_S)


class OneAtATime(PrefillEngine):
    """A prefill engine with a queue."""

    def __init__(self, takes: float) -> None:
        super().__init__(takes)
        self._turn = anyio.Lock()

    async def _answer(self, received: Received) -> Response:
        async with self._turn:
            return await super()._answer(received)


class RealClientDecode(DecodeEngine):
    """A decode engine that posts its tickets as its scheduler does."""

    def __init__(self, client: MetaserverClient) -> None:
        super().__init__()
        self.client = client
        self.outcomes: dict[str, PostOutcome] = {}

    async def _prefill(self, received: Received) -> bool:
        url = received.body["kv_transfer_params"]["metaserver"]
        keys = []
        for request_id in self._engine_request_ids(received):
            ticket = make_ticket(request_id, f"ticket-of-{request_id}")
            self.tickets.append(ticket)
            self.client.post(ticket["ticket_id"], url, ticket)
            keys.append(ticket["ticket_id"])
        try:
            while not self.outcomes.keys() >= set(keys):
                self.outcomes.update((outcome.key, outcome) for outcome in self.client.poll())
                await anyio.sleep(0.01)
        finally:
            for key in keys:
                self.client.cancel(key)
        return all(self.outcomes[key].ok for key in keys)


@contextmanager
def real_client(config: ConnectorConfig = CONFIG) -> Iterator[MetaserverClient]:
    client = MetaserverClient(config, own_host="127.0.0.1")
    yield client
    client.close()


def burst(cluster: Cluster, size: int, **fields: Any) -> tuple[list[int], float]:
    """Sends that many requests at once. Returns their statuses, and how long the last one took."""
    began = time.monotonic()
    with ThreadPoolExecutor(size) as clients:
        answers = [clients.submit(cluster.complete, **fields) for _ in range(size)]
        return [answer.result().status_code for answer in answers], time.monotonic() - began


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_per_prefill": 2}],
    ids=["in-prefills-queue", "in-the-proxys-line"],
)
def test_the_tail_of_a_burst_that_outlasts_the_transfer_timeout_succeeds(limits: dict[str, Any]) -> None:
    """Through one slow engine that works all the time."""
    with (
        real_client() as client,
        running_cluster(
            prefill_engine=OneAtATime(takes=0.8), decode_engine=RealClientDecode(client), attempts=1, **limits
        ) as cluster,
    ):
        statuses, took = burst(cluster, 12)
        assert statuses == [200] * 12
        assert took > 2 * DEADLINE_S
        assert len(cluster.prefill.received) == 12, "nothing was tried again"


@contextmanager
def proxy_process(prefill: PrefillEngine, decode: DecodeEngine) -> Iterator[tuple[int, str]]:
    """A proxy in a process of its own: its number and URL."""
    with Servers() as servers:
        urls = servers.start(lambda _: prefill.app), servers.start(lambda _: decode.app)
        with running_proxy(*urls) as (process, port):
            yield process.pid, f"http://127.0.0.1:{port}"


def test_a_proxy_that_hangs_ends_the_wait_in_the_queue() -> None:
    with real_client() as client:
        prefill, decode = PrefillEngine(), RealClientDecode(client)
        prefill.hangs = True
        with proxy_process(prefill, decode) as (pid, url), ThreadPoolExecutor(1) as clients:
            answer = clients.submit(httpx.post, f"{url}/v1/completions", json=COMPLETION, timeout=60, **PLAIN_HTTP)
            assert prefill.working.wait(20)
            time.sleep(1.5 * DEADLINE_S)
            assert decode.outcomes == {}, "it waits as long as the proxy says so"
            os.kill(pid, signal.SIGSTOP)
            stopped = time.monotonic()
            try:
                eventually(lambda: decode.outcomes)
                assert time.monotonic() - stopped < 3 * DEADLINE_S
                [outcome] = decode.outcomes.values()
                assert outcome.reason.endswith("did not answer within 4 s: prefill is overloaded or the proxy hangs")
            finally:
                os.kill(pid, signal.SIGCONT)
            assert answer.result().status_code >= 500


def test_a_prefill_engine_that_stops_with_a_queue_loses_it_to_another() -> None:
    """Long before any timeout of decode."""
    stops = PrefillEngine()
    stops.hangs = True
    with real_client(ConnectorConfig(transfer_timeout_s=30.0)) as client, Servers() as others:
        urls = (others.start(lambda _: stops.app),)
        limits = {"max_per_prefill": 2, "probe_timeout": 0.5}
        with (
            running_cluster(other_prefill=urls, decode_engine=RealClientDecode(client), **limits) as cluster,
            ThreadPoolExecutor(8) as clients,
        ):
            answers = [clients.submit(cluster.complete) for _ in range(8)]
            assert stops.working.wait(10)
            stops.frozen = True
            assert [answer.result().status_code for answer in answers] == [200] * 8
            stops.frozen = False


def test_a_prefill_engine_that_works_for_others_is_waited_for() -> None:
    """Another proxy's prompts are before ours in its queue: only its count of tokens says that it works."""
    with running_cluster(read_timeout=0.6, check_interval=0.05) as cluster, ThreadPoolExecutor(1) as client:
        cluster.prefill.holds = True
        cluster.prefill.metrics = "vllm:prompt_tokens_total 1\n"
        answer = client.submit(cluster.complete)
        assert cluster.prefill.working.wait(10)
        for count in range(2, 22):
            cluster.prefill.metrics = f"vllm:prompt_tokens_total {count}\n"
            time.sleep(0.1)
        assert not cluster.prefill.cancelled.is_set()
        cluster.prefill.holds = False
        assert answer.result().status_code == 200


def test_a_prefill_engine_that_answers_probes_and_computes_nothing_is_given_up() -> None:
    idle = PrefillEngine()
    idle.hangs = True
    idle.metrics = "vllm:prompt_tokens_total 7\n"
    with beside(prefill=idle, read_timeout=0.6, check_interval=0.05) as cluster:
        assert cluster.complete().status_code == 200
        assert idle.cancelled.wait(5)
        assert len(cluster.prefill.received) == 1
