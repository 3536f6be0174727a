# SPDX-License-Identifier: Apache-2.0
"""Tickets that wait in a queue for prefill: the real client of decode's scheduler, a real proxy, engines' stand-ins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
from engine_standin import DecodeEngine, PrefillEngine, Received, make_ticket
from proxy_cluster import Cluster, running_cluster
from starlette.responses import Response

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.decode.metaserver_client import MetaserverClient
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
