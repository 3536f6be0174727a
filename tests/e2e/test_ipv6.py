# SPDX-License-Identifier: Apache-2.0
"""Engines and proxy at an IPv6 address: requests, tickets, grants and KV all go over `::1`."""

import dataclasses
from collections.abc import Sequence

import psutil
import pytest

from harness.client import Client, Messages, random_prompt
from harness.clusters import PLAIN, Cluster, one_to_one
from harness.engines import Server
from harness.failures import wait_all_blocks_free
from harness.pool import Reference
from harness.routers import Flow, stand_in
from harness.waiting import wait_until

AT_IPV6 = dataclasses.replace(
    one_to_one(1, 2, token_major=True, engine=dataclasses.replace(PLAIN, host="::1")),
    name="ipv6-token-major-tp1-to-tp2",
    single=PLAIN,
)

pytestmark = [
    pytest.mark.long,  # tests/integration/test_ipv6.py has transfers between ranks at such addresses
    pytest.mark.parametrize("cluster", [AT_IPV6], ids=str, indirect=True),
    pytest.mark.timeout(600),
]

MESSAGES: Messages = [{"role": "user", "content": "Which layer comes before layer 6? " * 10}]
DELIVERED = "vllm:kv_pd_ticket_to_ready_seconds_count"


def ipv4_connections(servers: Sequence[Server]) -> list[object]:
    """Returns the TCP connections between these servers that use IPv4. Those within one (gloo) do not count."""
    found = [
        (server, connection)
        for server in servers
        for pid in server.process.members()
        for connection in psutil.Process(pid).net_connections("tcp4")
    ]
    owners = {connection.laddr.port: server for server, connection in found}
    return [each for server, each in found if each.raddr and owners.get(each.raddr.port, server) is not server]


def test_tokens(cluster: Cluster, client: Client, reference: Reference) -> None:
    before = cluster.decode[0].metric(DELIVERED)
    prompts = [random_prompt(tokens, "ipv6") for tokens in (300, 1000)]
    whole = client.complete(prompts[0])
    streamed = client.complete(prompts[1], stream=True)
    chat = client.chat(MESSAGES)
    assert [whole.token_ids, streamed.token_ids] == [reference.complete(prompt) for prompt in prompts]
    assert chat.token_ids == reference.chat(MESSAGES)
    wait_until(lambda: cluster.decode[0].metric(DELIVERED) == before + 3, 30)
    assert ipv4_connections([*cluster.prefill, *cluster.decode, cluster.proxy]) == []
    wait_all_blocks_free(cluster)


@pytest.mark.parametrize("flow", [Flow.VLLM_NIXL, Flow.VLLM_MOONCAKE], ids=lambda flow: flow.name)
def test_a_router_that_asks_prefill_first(cluster: Cluster, reference: Reference, flow: Flow) -> None:
    """Prefill, or its answer to `GET /query`, names its address, and decode offers the ticket there."""
    prompt = random_prompt(300, f"ipv6 {flow}")
    [prefill], [decode] = cluster.prefill, cluster.decode
    with stand_in(flow, prefill, decode) as router, Client(router.url, model=str(cluster.model)) as through:
        answer = through.complete(prompt)
    if flow is Flow.VLLM_NIXL:
        [named] = router.answers
        assert named is not None
        assert named["ticket_host"] == prefill.config.host
    assert answer.token_ids == reference.complete(prompt)
    assert answer.kv_transfer_params is not None
    assert answer.kv_transfer_params["received_bytes"] > 0
    wait_all_blocks_free(cluster)
