# SPDX-License-Identifier: Apache-2.0
"""Real engines and a proxy with a secret. Routers that cannot sign work before them, because prefill signs what they
carry. An address that a client makes up gets no connection."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.documented import documented
from harness.engines import HOST
from harness.failures import wait_all_blocks_free
from harness.plain_http import PLAIN_HTTP
from harness.pool import ClusterPool, Reference
from harness.routers import HAS_VLLM_ROUTER, NEEDS_VLLM_ROUTER, Flow, StandIn, stand_in, vllm_router
from harness.tcp_server import unvisited
from harness.waiting import wait_until
from vllm_ascend_pd.core.protocol import METASERVER_PATH

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster(secured: ClusterConfig, cluster_pool: ClusterPool) -> Cluster:
    return cluster_pool.get(secured)


@pytest.fixture
def router(cluster: Cluster) -> Iterator[StandIn]:
    """vLLM's proxy for NIXL, as a stand-in."""
    with stand_in(Flow.VLLM_NIXL, cluster.prefill[0], cluster.decode[0]) as running:
        yield running


def assert_right(client: Client, reference: Reference, name: str) -> None:
    prompts = [random_prompt(tokens, name) for tokens in (129, 300, 700)]
    answers = at_once(client.complete, prompts, concurrency=3)
    assert [answer.token_ids for answer in answers] == [reference.complete(prompt) for prompt in prompts]
    assert all(answer.kv_transfer_params["received_bytes"] > 0 for answer in answers), "prefill's KV, not decode's own"


def test_our_proxy(cluster: Cluster, client: Client, reference: Reference) -> None:
    assert_right(client, reference, "by our proxy")
    wait_all_blocks_free(cluster)


def test_a_router_that_cannot_sign(cluster: Cluster, router: StandIn, reference: Reference) -> None:
    with Client(router.url, model=str(cluster.model)) as client:
        assert_right(client, reference, "by a stand-in")
    wait_all_blocks_free(cluster)


@pytest.mark.skipif(not HAS_VLLM_ROUTER, reason=NEEDS_VLLM_ROUTER)
def test_vllm_router(cluster: Cluster, reference: Reference, engine_logs: Path) -> None:
    """Its own binary, by the page's command."""
    urls = {"http://127.0.0.1:8100": cluster.prefill[0].url, "http://127.0.0.1:8200": cluster.decode[0].url}
    start = "vllm-router --vllm-pd-disaggregation --kv-connector nixl"
    words = documented("docs/routers.md", start, {**urls, " --port 8000": ""})
    with (
        vllm_router("vllm-router-and-a-secret", words, engine_logs) as running,
        Client(running.url, model=str(cluster.model)) as client,
    ):
        assert_right(client, reference, "by vllm-router")
    wait_all_blocks_free(cluster)


def test_a_client_reaches_no_address_of_its_own(cluster: Cluster, router: StandIn) -> None:
    """It reaches decode's port, and has seen what prefill and the proxy sign."""
    with Client(router.url, model=str(cluster.model)) as client:
        client.complete(random_prompt(300, "seen"))
    [seen] = router.answers
    assert seen is not None
    assert len(seen["ticket_listener_signature"]) == 64

    with unvisited() as port:
        url = f"http://{HOST}:{port}"
        wanted = {"do_remote_prefill": True, "do_remote_decode": False}
        prompt = wanted | {"remote_engine_id": seen["remote_engine_id"], "transfer_id": seen["transfer_id"]}
        metaserver = wanted | {"metaserver": url + METASERVER_PATH}
        signature = seen["ticket_listener_signature"]
        made_up: list[tuple[dict[str, Any], str]] = [
            (seen | {"ticket_port": port}, "ticket_host: its signature is wrong"),
            (prompt | {"ticket_host": HOST, "ticket_port": port}, "ticket_host: no signature of prefill's came"),
            (prompt | {"remote_bootstrap_addr": url}, "name host and port in decode's peers"),
            (metaserver, "the proxy has not signed it: give the proxy this engine's secret file"),
            (metaserver | {"metaserver_signature": signature}, "metaserver's URL is refused: its signature is wrong"),
        ]
        for params, reason in made_up:
            body = {"model": str(cluster.model), "prompt": random_prompt(300, reason), "max_tokens": 2}
            body["kv_transfer_params"] = params
            answer = httpx.post(f"{cluster.decode[0].url}/v1/completions", json=body, timeout=240, **PLAIN_HTTP)
            assert answer.status_code == 500, params
            wait_until(lambda: reason in cluster.decode[0].log.read_text(errors="replace"), 30)  # noqa: B023
    wait_all_blocks_free(cluster)
