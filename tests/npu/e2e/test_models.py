# SPDX-License-Identifier: Apache-2.0
"""Other kinds of caches on vllm-ascend: MLA's latent, sliding windows beside full attention. The short form has MLA in
`test_recipe_pairs.py`."""

import pytest

from harness.agreement import assert_agree, listed_logprobs
from harness.client import Client, at_once, random_prompt
from harness.clusters import POISONED_TOKENS, Cluster
from harness.failures import poisoned_fails_alone, wait_all_blocks_free
from harness.models import MLA, SLIDING, sliding_bytes
from harness.pool import long
from harness.waiting import wait_for
from npu_engines import one_to_one

PROMPT_TOKENS = (1, 127, 128, 129, 327, 384, 1000, 2500)

SLIDING_TP1 = long(one_to_one("sliding-tp1-to-tp1", 1, 1, model=SLIDING))
CLUSTERS = [
    long(one_to_one("mla-tp1-to-tp1", 1, 1, model=MLA)),
    long(one_to_one("mla-tp2-to-tp1", 2, 1, model=MLA)),
    SLIDING_TP1,
    long(one_to_one("sliding-tp2-to-tp1", 2, 1, model=SLIDING)),
]

pytestmark = [
    pytest.mark.npu,
    pytest.mark.timeout(600),
]

all_clusters = pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)


@all_clusters
def test_alone(client: Client, reference) -> None:
    prompts = [random_prompt(tokens, "alone") for tokens in PROMPT_TOKENS]
    assert_agree(reference, prompts, [client.complete(prompt) for prompt in prompts])


@all_clusters
def test_decode_computes_some_prompts(cluster: Cluster, client: Client, reference) -> None:
    """By the requests' header, while others' KV arrives."""

    def by_decode() -> float:
        samples = cluster.decode[0].samples("vllm:kv_pd_prompts_total")
        return sum(value for labels, value in samples if (labels["by"], labels["reason"]) == ("decode", "requested"))

    before = by_decode()
    prompts = [random_prompt(tokens, f"some-{tokens}") for tokens in (5, 128, 300, 1000)]
    logprobs, headers = listed_logprobs(reference.dtype), {"X-Who-Computes": "decode"}
    with Client(cluster.url, client.model, logprobs=logprobs, headers=headers) as asking:

        def ask(prompt: list[int]):
            return (asking if prompts.index(prompt) % 2 else client).complete(prompt)

        assert_agree(reference, prompts, at_once(ask, prompts, concurrency=4))
    assert wait_for(by_decode, lambda found: found >= before + 2, 30) == before + 2


@pytest.mark.long
@all_clusters
def test_eight_at_a_time(client: Client, reference) -> None:
    prompts = [random_prompt(tokens, f"eight-{i}") for i, tokens in enumerate(2 * PROMPT_TOKENS)]
    completions = at_once(lambda prompt: client.complete(prompt, stream=True), prompts, concurrency=8)
    assert_agree(reference, prompts, completions)


@pytest.mark.parametrize("cluster", [SLIDING_TP1], ids=str, indirect=True)
@pytest.mark.parametrize("tokens", [327, 2500])
def test_only_the_window_of_sliding_layers_is_sent(client: Client, tokens: int) -> None:
    """Of 327 tokens the last one, which decode computes, sees the last one of the first block."""
    completion = client.complete(random_prompt(tokens, "window"))
    assert completion.kv_transfer_params is not None
    assert completion.kv_transfer_params["received_bytes"] == sliding_bytes(tokens, block_size=128)


@pytest.mark.parametrize("cluster", [SLIDING_TP1], ids=str, indirect=True)
def test_a_request_of_several_cache_groups_fails_alone(cluster: Cluster, client: Client, reference) -> None:
    """vLLM 0.23, which vllm-ascend builds on, needs `connector/patches/vllm_0_23_lost_blocks.py` for this."""
    assert poisoned_fails_alone(client, reference, [300, POISONED_TOKENS + 1, 1000], 1).status_code == 502
    wait_all_blocks_free(cluster)
