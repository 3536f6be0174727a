# SPDX-License-Identifier: Apache-2.0
"""Other kinds of caches on vllm-ascend: MLA's latent, sliding windows beside full attention."""

import time

import httpx
import pytest

from harness.client import Client, at_once, random_prompt
from harness.engines import POISONED_TOKENS, Cluster
from harness.models import MLA, SLIDING, WINDOW
from npu_engines import one_to_one

PROMPT_TOKENS = (1, 127, 128, 129, 384, 1000, 2500)

SLIDING_TP1 = one_to_one("sliding-tp1-to-tp1", 1, 1, model=SLIDING)
CLUSTERS = [
    one_to_one("mla-tp1-to-tp1", 1, 1, model=MLA),
    one_to_one("mla-tp2-to-tp1", 2, 1, model=MLA),
    SLIDING_TP1,
    one_to_one("sliding-tp2-to-tp1", 2, 1, model=SLIDING),
]

pytestmark = [
    pytest.mark.npu,
    pytest.mark.timeout(600),
]

all_clusters = pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)


@all_clusters
def test_alone(client: Client, reference) -> None:
    prompts = {tokens: random_prompt(tokens, "alone") for tokens in PROMPT_TOKENS}
    outputs = {n: client.complete(prompt).token_ids for n, prompt in prompts.items()}
    assert outputs == {n: reference.complete(prompt) for n, prompt in prompts.items()}


@all_clusters
def test_eight_at_a_time(client: Client, reference) -> None:
    prompts = [random_prompt(tokens, f"eight-{i}") for i, tokens in enumerate(2 * PROMPT_TOKENS)]
    completions = at_once(lambda prompt: client.complete(prompt, stream=True), prompts, concurrency=8)
    assert [completion.token_ids for completion in completions] == [reference.complete(p) for p in prompts]


@pytest.mark.parametrize("cluster", [SLIDING_TP1], ids=str, indirect=True)
def test_only_the_window_of_sliding_layers_is_sent(client: Client) -> None:
    completion = client.complete(random_prompt(2500, "window"))
    assert completion.kv_transfer_params is not None
    layers = dict(SLIDING.config)["layer_types"]
    sliding, full = (layers.count(f"{kind}_attention") for kind in ("sliding", "full"))
    in_window = 20 - (2500 - WINDOW + 1) // 128  # of 20 blocks, those that the next token sees
    block_bytes = 128 * SLIDING.kv_bytes_per_token // SLIDING.layers
    assert completion.kv_transfer_params["received_bytes"] == (20 * full + in_window * sliding) * block_bytes


@pytest.mark.parametrize("cluster", [SLIDING_TP1], ids=str, indirect=True)
def test_a_request_of_several_cache_groups_fails_alone(cluster: Cluster, client: Client, reference) -> None:
    """vLLM 0.23, which vllm-ascend builds on, does not know how by itself: see `vllm_ascend_pd/compat.py`."""
    lengths = [300, POISONED_TOKENS, 1000]
    prompts = [random_prompt(tokens, "poison") for tokens in lengths]

    def attempt(prompt: list[int]) -> object:
        try:
            return client.complete(prompt).token_ids
        except httpx.HTTPStatusError as error:
            return error.response.status_code

    answers = at_once(attempt, prompts, concurrency=len(prompts))
    assert answers.pop(1) == 500
    assert answers == [reference.complete(prompts[0]), reference.complete(prompts[2])]
    deadline = time.monotonic() + 180
    while any(engine.metric("vllm:kv_cache_usage_perc") for engine in [*cluster.prefill, *cluster.decode]):
        assert time.monotonic() < deadline, "blocks of the failed request are still in use"
        time.sleep(0.2)
