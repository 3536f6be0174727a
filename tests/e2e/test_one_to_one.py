# SPDX-License-Identifier: Apache-2.0
"""One prefill and one decode engine give, token by token, what a single vLLM instance gives.

Greedy, float32, prefill in chunks of 512 tokens. Prefix caching is on, as it is by default; each test has
prompts of its own, so that only those that mean to find cached blocks do. Text, chats, lists and samples are in
`test_kinds_of_requests.py`.
"""

import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import TP2_TO_TP1, TRACED, one_to_one
from harness.pool import long

PROMPT_TOKENS = (1, 127, 128, 129, 384, 1000, 2500)
"""Around a block's end (128), several blocks, several chunks (512)."""

CLUSTERS = [
    TP2_TO_TP1,
    TRACED,
    *(long(one_to_one(p, d)) for p, d in [(1, 1), (1, 2), (2, 2)]),
    long(one_to_one(4, 1, token_major=True)),
]

pytestmark = [
    pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True),
    pytest.mark.timeout(600),  # the first test of a cluster starts it
]


def test_alone(client: Client, reference) -> None:
    prompts = {tokens: random_prompt(tokens, "alone") for tokens in PROMPT_TOKENS}
    outputs = {n: client.complete(prompt).token_ids for n, prompt in prompts.items()}
    assert outputs == {n: reference.complete(prompt) for n, prompt in prompts.items()}


def test_eight_at_a_time(client: Client, reference) -> None:
    prompts = [random_prompt(tokens, f"eight-{i}") for i, tokens in enumerate(3 * PROMPT_TOKENS)]
    completions = at_once(lambda prompt: client.complete(prompt, stream=True), prompts, concurrency=8)
    outputs = [completion.token_ids for completion in completions]
    assert outputs == [reference.complete(prompt) for prompt in prompts]


def test_chunks_arrive_while_later_ones_are_computed(client: Client, reference) -> None:
    prompt = random_prompt(2500, "chunks")
    completion = client.complete(prompt)
    assert completion.token_ids == reference.complete(prompt)
    transfer = completion.kv_transfer_params
    assert 0 < transfer["bytes_before_prefill_end"] <= transfer["received_bytes"]
