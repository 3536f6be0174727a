# SPDX-License-Identifier: Apache-2.0
"""Other kinds of caches than full attention's: the tokens of a single instance all the same.

MLA's latent, the same on every rank; sliding windows and full attention in one memory; states of Mamba and of
linear attention beside attention; 8-bit floats.
"""

import dataclasses
from collections.abc import Iterable

import httpx
import pytest
from test_who_computes import STATES

from harness.client import Client, at_once, random_prompt
from harness.clusters import LOSING_TOKENS, POISONED_TOKENS, Cluster, one_to_one
from harness.engines import EngineConfig
from harness.failures import poisoned_fails_alone, wait_all_blocks_free
from harness.models import GATED_DELTA, MAMBA, MLA, SHARED, SLIDING, sliding_bytes
from harness.pool import Reference, long

PROMPT_TOKENS = (1, 2, 127, 128, 129, 327, 384, 1000, 2500)

# Block size, chunks and caching are what vLLM's CPU backend sets for MLA anyway. Its rotary embedding kernel turns the
# wrong elements of MLA's K where a step has more than one token: prefill and decode of one engine do not agree then.
FOR_MLA = EngineConfig(
    block_size=16,
    prefix_caching=False,
    max_num_batched_tokens=None,
    args=("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}'),
)
FOR_STATES = EngineConfig(prefix_caching=False)
FOR_GATED_DELTA = EngineConfig(prefix_caching=False, dtype="bfloat16")
# Computed in float32: with bfloat16 vLLM's attention ends in an illegal instruction on some processors with AMX.
IN_8_BITS = EngineConfig(args=("--kv-cache-dtype", "fp8_e5m2"))

SLIDING_TP1 = one_to_one(1, 1, model=SLIDING)
MLA_TP1 = one_to_one(1, 1, model=MLA, engine=FOR_MLA)
GATED_DELTA_TP1 = one_to_one(1, 1, model=GATED_DELTA, engine=FOR_GATED_DELTA)
FP8_TP1 = dataclasses.replace(one_to_one(1, 1, engine=IN_8_BITS), name="fp8-tp1-to-tp1")
# The short form has MLA in tests/npu/e2e/test_recipe_pairs.py.
CLUSTERS = [
    long(SLIDING_TP1),
    long(one_to_one(1, 1, model=SHARED)),
    long(MLA_TP1),
    STATES,
    long(one_to_one(2, 1, model=MAMBA, engine=FOR_STATES)),
    long(GATED_DELTA_TP1),
    long(one_to_one(2, 1, model=GATED_DELTA, engine=FOR_GATED_DELTA)),
    long(FP8_TP1),
]

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("prefill_computes")]

all_clusters = pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)


BFLOAT16_TIE = 1.0
"""bfloat16 rounds otherwise where tokens are computed in other steps, or beside others, and that decides between tokens
of close log probabilities. A single engine's own answers, eight at a time, are up to 0.7 below its best ones; without
one of the tensors below they are 1.5 to 26 below."""


def is_right(cluster: Cluster, reference: Reference, prompt: list[int], output: tuple[int, ...]) -> bool:
    """Is `output` what the single engine gives? In bfloat16: are its tokens, each after those before it, ones that the
    single engine chooses, or might have?"""
    if cluster.decode[0].config.dtype == "float32":
        return output == reference.complete(prompt)
    return reference.shortfall(prompt, output) <= BFLOAT16_TIE


@all_clusters
def test_alone(cluster: Cluster, client: Client, reference: Reference) -> None:
    prompts = {tokens: random_prompt(tokens, "alone") for tokens in PROMPT_TOKENS}
    outputs = {n: client.complete(prompt).token_ids for n, prompt in prompts.items()}
    assert [n for n in prompts if not is_right(cluster, reference, prompts[n], outputs[n])] == []


STALE_STATE = 2
"""vLLM 0.30 takes a prompt of one token for a step of decoding, and a gated delta net then starts from the state that a
request before it has left in its block. A single engine does so, too. Prefill computes one token of a prompt of two."""


@all_clusters
def test_eight_at_a_time(cluster: Cluster, client: Client, reference: Reference) -> None:
    lengths = [n for n in PROMPT_TOKENS if n > STALE_STATE or cluster.config.model is not GATED_DELTA]
    prompts = [random_prompt(tokens, f"eight-{i}") for i, tokens in enumerate(2 * lengths)]
    completions = at_once(lambda prompt: client.complete(prompt, stream=True), prompts, concurrency=8)
    outputs = zip(prompts, completions, strict=True)
    wrong = [len(p) for p, completion in outputs if not is_right(cluster, reference, p, completion.token_ids)]
    assert wrong == []


RECURRENT_AND_KV = (9, 19, 30)
"""Three layers with states have ten tensors each, the last of which is the recurrent one: here those of the first two;
then the KV of the fourth layer."""


@pytest.mark.parametrize(
    ("cluster", "tensors", "left_to_decode"),
    [
        long(SLIDING_TP1, range(SLIDING.layers), 1),
        long(MLA_TP1, range(MLA.layers), 0),
        (STATES, (0, 6, 8, *RECURRENT_AND_KV), 1),  # x of the convolution's oldest row, x and C of the newest
        long(GATED_DELTA_TP1, (8, *RECURRENT_AND_KV), 1),  # V of the newest row
        long(FP8_TP1, (0, 1), 0),  # what a later layer loses may move log probabilities by less than a tie
    ],
    ids=str,
    indirect=["cluster"],
)
def test_every_tensor_matters(
    cluster: Cluster, client: Client, reference: Reference, tensors: Iterable[int], left_to_decode: int
) -> None:
    """That tokens are equal would mean little if they were equal without it: none may be lost unnoticed."""
    prompts = {i: random_prompt(LOSING_TOKENS + i + left_to_decode, "lose") for i in tensors}
    unnoticed = []
    for i, prompt in prompts.items():
        try:
            output = client.complete(prompt).token_ids
        except httpx.HTTPStatusError as error:  # the block's old bytes may give log probabilities of NaN
            if "Out of range float values" not in str(error):
                raise
        else:
            unnoticed += [i] if is_right(cluster, reference, prompt, output) else []
    assert unnoticed == []


@pytest.mark.parametrize("cluster", [long(SLIDING_TP1)], ids=str, indirect=True)
def test_only_the_window_of_sliding_layers_is_sent(client: Client) -> None:
    completion = client.complete(random_prompt(2500, "window"))
    assert completion.kv_transfer_params is not None
    assert completion.kv_transfer_params["received_bytes"] == sliding_bytes(2500, block_size=128)


@pytest.mark.parametrize("cluster", [long(SLIDING_TP1)], ids=str, indirect=True)
def test_a_request_of_several_cache_groups_fails_alone(cluster: Cluster, client: Client, reference: Reference) -> None:
    assert poisoned_fails_alone(client, reference, [300, 129, POISONED_TOKENS + 1, 1000, 5], 1).status_code == 503
    wait_all_blocks_free(cluster)
