# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's example proxy drives our connectors, unchanged: a stand-in for it between real engines."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import POISONED_TOKENS, TP2_TO_TP1, Cluster
from harness.failures import wait_all_blocks_free
from harness.layerwise_proxy import LayerwiseProxy, layerwise_proxy

pytestmark = [
    pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True),
    pytest.mark.timeout(600),
]

# 30 s until decode gives up a ticket that nobody writes for, and what the engines' steps take.
SETTLED_WITHIN_S = 30.0 + 30.0


@pytest.fixture
def theirs(cluster: Cluster) -> Iterator[LayerwiseProxy]:
    with layerwise_proxy(cluster.prefill[0].url, cluster.decode[0].url) as proxy:
        yield proxy


def test_tokens(theirs: LayerwiseProxy, cluster: Cluster, reference) -> None:
    prompts = [random_prompt(tokens, f"layerwise {i}") for i, tokens in enumerate((1, 128, 300, 129, 1000, 640))]
    messages = [{"role": "user", "content": "Which layer comes before layer 9? " * 10}]
    with Client(theirs.url, model=str(cluster.model)) as client:
        whole = at_once(client.complete, prompts, concurrency=6)
        streams = [client.complete(prompt, stream=True) for prompt in prompts[:3]]
        chat = client.chat(messages, max_completion_tokens=16)
    assert [answer.token_ids for answer in whole] == [reference.complete(prompt) for prompt in prompts]
    assert [answer.token_ids for answer in streams] == [reference.complete(prompt) for prompt in prompts[:3]]
    assert chat.token_ids == reference.chat(messages)
    assert theirs.swallowed == []
    assert len(theirs.tickets) >= len(prompts) + 1, "the prompts were not prefilled elsewhere"
    assert whole[4].kv_transfer_params["received_bytes"] > 0


def ask(proxy: LayerwiseProxy, cluster: Cluster, prompt: object) -> str:
    """The client's answer, whose status says nothing."""
    body = {"model": str(cluster.model), "prompt": prompt, "max_tokens": 4}
    response = httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=300, trust_env=False)
    assert response.status_code == 200
    return response.text


@pytest.mark.long
def test_prefill_that_fails_unseen(cluster: Cluster, client: Client, reference) -> None:
    """The proxy says that all went well: decode finds out, fails the request, and gets its blocks back."""
    decode = cluster.decode[0].url
    with socket.socket() as unheard, ThreadPoolExecutor(3) as pool:
        unheard.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with (
            layerwise_proxy(nobody, decode, attempts=1) as unreachable,
            layerwise_proxy(cluster.prefill[0].url, decode, attempts=1) as losing,
        ):
            begun = time.monotonic()
            never_prefilled = pool.submit(ask, unreachable, cluster, random_prompt(200, "nobody prefills"))
            lost = pool.submit(ask, losing, cluster, random_prompt(POISONED_TOKENS, "lost on its way"))
            # The first prompt alone has a ticket that this proxy knows.
            several = pool.submit(ask, losing, cluster, [random_prompt(200, "first"), random_prompt(200, "second")])
            prompt = random_prompt(300, "meanwhile")
            assert client.complete(prompt).token_ids == reference.complete(prompt)
            assert [each.result() for each in (never_prefilled, lost, several)] == ["", "", ""]
            assert time.monotonic() - begun < SETTLED_WITHIN_S
            assert unreachable.swallowed[0].startswith("prefill: ")
            assert "500 Internal Server Error" in unreachable.swallowed[1]
            assert len(losing.swallowed) == 2, losing.swallowed
            assert all("500 Internal Server Error" in each for each in losing.swallowed)
    log = cluster.decode[0].log.read_text()
    assert "no KV received: prefill ended without writing everything" in log
    assert log.count("no KV received: ") >= 3
    wait_all_blocks_free(cluster)
