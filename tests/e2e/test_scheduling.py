# SPDX-License-Identifier: Apache-2.0
"""Whatever prefill's scheduler does: tokens equal a single engine's, and every block crosses the link once.

Prefill computes at most 48 tokens in a step and 20 of each prompt, blocks have 128, and it has 12 of them: prompts are
cut where no block ends, and few of them fit at once. Prefill has no tokenizer, which `test_same_prompt.py` is about.
"""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from signal import SIGCONT, SIGSTOP

import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.engines import Engine, EngineConfig, Role
from harness.failures import wait_all_blocks_free
from harness.models import TINY
from harness.pool import Reference

BLOCK = 128
BLOCK_BYTES = BLOCK * TINY.kv_bytes_per_token

# What a failed write leaves behind is waited for three times `write_timeout_s`, an engine that has ended three times
# `control_timeout_s`.
TIMES = (("grant_timeout_s", 60.0), ("lease_s", 20.0))
DECODE = EngineConfig(Role.DECODE, connector_extra=TIMES, engine_id="decode", args=("--enable-scale-out",))
PREFILL = dataclasses.replace(
    DECODE,
    role=Role.PREFILL,
    max_model_len=1200,
    max_num_batched_tokens=48,
    kv_cache_bytes=12 * BLOCK_BYTES,
    args=("--max-num-seqs", "8", "--long-prefill-token-threshold", "20", "--skip-tokenizer-init"),
    engine_id="prefill",
)
FEW_BLOCKS = ClusterConfig("few-blocks-tiny-chunks", (PREFILL,), (DECODE,))

pytestmark = [
    pytest.mark.parametrize("cluster", [FEW_BLOCKS], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def bytes_of(tokens: int, cached: int = 0) -> int:
    """What crosses the link for a prompt: all of its blocks but the `cached` ones that decode has."""
    return (-(-tokens // BLOCK) - cached) * BLOCK_BYTES


def ask(client: Client, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """The tokens that follow `prompt`, and how many bytes decode received for it."""
    completion = client.complete(prompt)
    assert completion.kv_transfer_params is not None
    return completion.token_ids, completion.kv_transfer_params["received_bytes"]


def test_chunks_smaller_than_a_block(client: Client, reference: Reference) -> None:
    prompts = [random_prompt(tokens, "chunks") for tokens in (2, 19, 20, 49, 127, 128, 129, 1000)]
    answers = [ask(client, prompt) for prompt in prompts]
    assert answers == [(reference.complete(prompt), bytes_of(len(prompt))) for prompt in prompts]


def preemptions(engine: Engine) -> float:
    return engine.metric("vllm:num_preemptions_total")


def test_preempted_while_blocks_are_on_their_way(cluster: Cluster, client: Client, reference: Reference) -> None:
    """Decode is stopped again and again, so that what prefill has computed piles up: its blocks run out."""
    [prefill], [decode] = cluster.prefill, cluster.decode
    prompts = [random_prompt(tokens, f"preempt-{i}") for i, tokens in enumerate(2 * (900, 1000, 1100, 650))]
    before = preemptions(prefill)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, client, prompt) for prompt in prompts]
        try:
            while not all(answer.done() for answer in asked):
                decode.process.signal_group(SIGSTOP)
                time.sleep(0.2)
                decode.process.signal_group(SIGCONT)
                time.sleep(0.4)
        finally:
            decode.process.signal_group(SIGCONT)
        answers = [answer.result() for answer in asked]
    assert preemptions(prefill) > before
    assert answers == [(reference.complete(prompt), bytes_of(len(prompt))) for prompt in prompts]
    wait_all_blocks_free(cluster)


def test_blocks_that_only_prefill_has_cached(cluster: Cluster, client: Client, reference: Reference) -> None:
    """It computes just the rest of the prompt, and sends all of it."""
    [prefill] = cluster.prefill
    prompt = random_prompt(700, "cached on prefill")
    with Client(prefill.url, model=client.model) as beside_decode:
        beside_decode.complete(prompt[:600], max_tokens=1)
    hits = prefill.metric("vllm:prefix_cache_hits_total")
    assert ask(client, prompt) == (reference.complete(prompt), bytes_of(700))
    assert prefill.metric("vllm:prefix_cache_hits_total") == hits + 4 * BLOCK


def test_blocks_that_only_decode_has_cached(cluster: Cluster, client: Client, reference: Reference) -> None:
    """Prefill, which has long used its own for others, computes the whole prompt and sends the rest of it."""
    [prefill] = cluster.prefill
    prompt = random_prompt(700, "cached on decode")
    longer = prompt + random_prompt(300, "its tail")
    assert ask(client, prompt) == (reference.complete(prompt), bytes_of(700))
    with Client(prefill.url, model=client.model) as beside_decode:
        at_once(lambda i: beside_decode.complete(random_prompt(1000, f"other-{i}"), max_tokens=1), range(2), 1)
    hits = prefill.metric("vllm:prefix_cache_hits_total")
    assert ask(client, longer) == (reference.complete(longer), bytes_of(1000, cached=5))
    assert prefill.metric("vllm:prefix_cache_hits_total") == hits


def test_the_rest_after_the_last_whole_block_is_sent_again(client: Client, reference: Reference) -> None:
    prompt = random_prompt(300, "complete")
    answer = reference.complete(prompt)
    assert ask(client, prompt) == (answer, bytes_of(300))
    assert ask(client, prompt) == (answer, bytes_of(300, cached=2))


@pytest.mark.parametrize("tokens", [128, 129, 256])
def test_nothing_is_sent_of_a_prompt_that_decode_has_cached(client: Client, reference: Reference, tokens: int) -> None:
    prompt = random_prompt(tokens, "complete")
    answer = reference.complete(prompt)
    assert ask(client, prompt) == (answer, bytes_of(tokens))
    again = client.complete(prompt)
    assert (again.token_ids, again.kv_transfer_params) == (answer, None)


def test_a_conversation_goes_on_where_decode_has_cached_what_it_said(client: Client, reference: Reference) -> None:
    """The second block's last tokens were never prefilled: decode computed them itself."""
    prompt = random_prompt(250, "conversation")
    said, _ = ask(client, prompt)
    longer = [*prompt, *said[:8]]
    assert ask(client, longer) == (reference.complete(longer), bytes_of(258, cached=2))
