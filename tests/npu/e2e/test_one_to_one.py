# SPDX-License-Identifier: Apache-2.0
"""One prefill and one decode engine on vllm-ascend give what a single vllm-ascend engine gives.

Greedy, bfloat16, prefill in chunks of 512 tokens, prefix caching on. The short form has TP 2 on prefill in
`test_parallel.py`.
"""

import pytest

from harness.agreement import LISTED, assert_agree, compare
from harness.client import Client, at_once, random_prompt
from harness.clusters import LOSING_TOKENS, Cluster
from harness.models import TINY
from harness.pool import Reference, long
from npu_engines import one_to_one

PROMPT_TOKENS = (1, 127, 128, 129, 384, 1000, 2500)

TP1_TO_TP1 = one_to_one("tp1-to-tp1", 1, 1)
OTHERS = [
    long(one_to_one("tp2-to-tp1", 2, 1)),
    long(one_to_one("tp1-to-tp2", 1, 2)),
    long(one_to_one("tp2-to-tp2", 2, 2)),
    long(one_to_one("tp4-to-tp1", 4, 1)),
    long(one_to_one("pp2-to-tp1", 1, 1, prefill_pp=2)),
    long(one_to_one("tp2-to-tp1-without-async-scheduling", 2, 1, args=("--no-async-scheduling",))),
]

pytestmark = [
    pytest.mark.npu,
    pytest.mark.timeout(600),
]

long_form = pytest.mark.parametrize("cluster", [long(TP1_TO_TP1), *OTHERS], ids=str, indirect=True)
all_clusters = pytest.mark.parametrize("cluster", [TP1_TO_TP1, *OTHERS], ids=str, indirect=True)
equal_sizes = pytest.mark.parametrize("cluster", [TP1_TO_TP1], ids=str, indirect=True)


@long_form
def test_alone(client: Client, reference) -> None:
    prompts = [random_prompt(tokens, "alone") for tokens in PROMPT_TOKENS]
    assert_agree(reference, prompts, [client.complete(prompt) for prompt in prompts])


@long_form
def test_eight_at_a_time(client: Client, reference) -> None:
    prompts = [random_prompt(tokens, f"eight-{i}") for i, tokens in enumerate(2 * PROMPT_TOKENS)]
    completions = at_once(lambda prompt: client.complete(prompt, stream=True), prompts, concurrency=8)
    assert_agree(reference, prompts, completions)


@equal_sizes
def test_engines_that_compute_alike_give_equal_tokens(client: Client, reference: Reference) -> None:
    """A single engine that is asked again computes the last token alone, as decode does, on cached blocks that it
    computed in prefill's chunks. Nothing is rounded differently then."""
    prompts = [random_prompt(tokens, "alike") for tokens in (129, 385, 897)]
    answers = [client.complete(prompt) for prompt in prompts]
    with Client(reference.engine.url, logprobs=LISTED) as single:
        for prompt, ours in zip(prompts, answers, strict=True):
            single.complete(prompt)
            theirs = single.complete(prompt)
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == tuple(pytest.approx(place, abs=1e-4) for place in theirs.logprobs)


@equal_sizes
def test_a_lost_tensor_is_noticed(client: Client, reference: Reference) -> None:
    """bfloat16's tolerance hides no lost K or V of any layer. At equal TP: `tests/plugins/faults.py` cannot lose
    what is regrouped."""
    prompts = [random_prompt(LOSING_TOKENS + tensor, "lose") for tensor in range(2 * TINY.layers)]
    found = [compare(client.complete(prompt), reference.answer(prompt))[1] for prompt in prompts]
    assert [tensor for tensor, why in enumerate(found) if why is None] == []


@all_clusters
def test_cached_blocks_are_not_fetched_again(client: Client, reference) -> None:
    prompt = random_prompt(1000, "cached")
    completions = [client.complete(prompt), client.complete(prompt)]
    assert_agree(reference, [prompt, prompt], completions)
    first, again = (c.kv_transfer_params["received_bytes"] for c in completions)
    assert again == pytest.approx(first / 8)


@all_clusters
def test_vllm_ascends_engines_know_their_weights(cluster: Cluster) -> None:
    """So they are compared: prefill's and decode's are equal in all tests here."""
    for engine in (*cluster.prefill, *cluster.decode):
        assert "this engine's weights are not known" not in engine.log.read_text()
