# SPDX-License-Identifier: Apache-2.0
"""Late tickets, behind routers, for caches of several kinds: windows beside full attention, states of Mamba."""

import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import PLAIN, Cluster, one_to_one
from harness.engines import EngineConfig
from harness.failures import wait_all_blocks_free
from harness.models import MAMBA, SLIDING
from harness.routers import Flow, stand_in

PROMPT_TOKENS = (2, 127, 128, 129, 327, 1000, 2500)
CLUSTERS = [
    one_to_one(prefill, decode, model=model, engine=engine)
    for model, engine in ((SLIDING, PLAIN), (MAMBA, EngineConfig(prefix_caching=False)))
    for prefill, decode in ((2, 1), (1, 2))
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)
@pytest.mark.parametrize("flow", [Flow.VLLM_NIXL, Flow.VLLM_MOONCAKE], ids=["prefill-first", "both-at-once"])
def test_tokens(flow: Flow, cluster: Cluster, reference) -> None:
    [prefill], [decode] = cluster.prefill, cluster.decode
    prompts = [random_prompt(tokens, f"{flow} {tokens}") for tokens in PROMPT_TOKENS]
    with stand_in(flow, prefill, decode) as router, Client(router.url, model=str(cluster.model)) as client:
        alone = [client.complete(prompt) for prompt in prompts[:4]]
        answers = alone + at_once(client.complete, prompts[4:], concurrency=3)
    assert [answer.token_ids for answer in answers] == [reference.complete(prompt) for prompt in prompts]
    assert all(answer.kv_transfer_params["received_bytes"] > 0 for answer in answers[1:])
    wait_all_blocks_free(cluster)
