# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on either side: the tokens of a single engine, and as many drafts accepted.

A draft without its KV of the prompt still ends in the right tokens, since drafts are verified: what was sent shows in
how many of them are accepted. So what drafts here computes what the served model does, as long as it has all of the
prompt: the served model itself, and an MTP layer and an EAGLE head that repeat their target's only layer.
"""

import dataclasses
from collections.abc import Callable

import pytest

from harness.client import Client, Prompt, at_once, random_prompt
from harness.clusters import LOSING_TOKENS, Cluster, ClusterConfig, one_to_one
from harness.engines import Engine, EngineConfig
from harness.models import EAGLE, MTP, ONE_LAYER, TINY, ModelSpec
from harness.pool import Reference, long

PROMPT_TOKENS = (1, 127, 128, 129, 384, 700, 1500)

NGRAM = EngineConfig(
    speculative=(("method", "ngram"), ("num_speculative_tokens", 3), ("prompt_lookup_min", 1), ("prompt_lookup_max", 3))
)
DRAFT_MODEL = EngineConfig(speculative=(("method", "draft_model"), ("model", TINY), ("num_speculative_tokens", 3)))
MTP_LAYER = EngineConfig(speculative=(("method", "mtp"), ("num_speculative_tokens", 3)))
EAGLE_HEAD = EngineConfig(speculative=(("method", "eagle"), ("model", EAGLE), ("num_speculative_tokens", 3)))


def drafting(name: str, engine: EngineConfig, model: ModelSpec, prefill_tp: int = 1) -> ClusterConfig:
    """Both sides draft as `engine` does."""
    return dataclasses.replace(one_to_one(prefill_tp, 1, model=model, engine=engine), name=name)


BOTH_EAGLE = drafting("eagle-tp2-to-eagle-tp1", EAGLE_HEAD, ONE_LAYER, prefill_tp=2)
BOTH_MTP = drafting("mtp-tp2-to-mtp-tp1", MTP_LAYER, MTP, prefill_tp=2)
BOTH_DRAFT_MODEL = drafting("draft-model-to-draft-model", DRAFT_MODEL, TINY)
_ONE_TO_ONE = drafting("", EAGLE_HEAD, ONE_LAYER)


def mixed(name: str, prefill: EngineConfig, decode: EngineConfig) -> ClusterConfig:
    """The sides draft in other ways."""
    [p], [d] = _ONE_TO_ONE.prefill, _ONE_TO_ONE.decode
    return dataclasses.replace(
        _ONE_TO_ONE,
        name=name,
        prefill=(dataclasses.replace(p, speculative=prefill.speculative),),
        decode=(dataclasses.replace(d, speculative=decode.speculative),),
    )


NGRAM_TO_EAGLE = mixed("ngram-to-eagle", NGRAM, EAGLE_HEAD)
EAGLE_TO_NGRAM = mixed("eagle-to-ngram", EAGLE_HEAD, NGRAM)

pytestmark = pytest.mark.timeout(600)


def accepted(engine: Engine, complete: Callable[[Prompt], object], prompts: list[Prompt]) -> float:
    """How many drafted tokens `engine` accepts in answers to `prompts`, one after the other. (vLLM counts more of them
    as drafted on decode: it fills a request's first step there up with some that cannot be accepted.)"""
    name = "vllm:spec_decode_num_accepted_tokens_total"
    before = engine.metric(name)
    for prompt in prompts:
        complete(prompt)
    return engine.metric(name) - before


@pytest.mark.parametrize(
    "cluster",
    [BOTH_MTP, long(BOTH_EAGLE), long(NGRAM_TO_EAGLE), long(EAGLE_TO_NGRAM), long(BOTH_DRAFT_MODEL)],
    ids=str,
    indirect=True,
)
def test_tokens_are_those_of_a_single_engine(client: Client, reference: Reference) -> None:
    prompts = [random_prompt(tokens, f"tokens-{i}") for i, tokens in enumerate(2 * PROMPT_TOKENS)]
    completions = at_once(client.complete, prompts, concurrency=8)
    assert [completion.token_ids for completion in completions] == [reference.complete(p) for p in prompts]


@pytest.mark.parametrize("cluster", [BOTH_MTP, long(BOTH_EAGLE), long(BOTH_DRAFT_MODEL)], ids=str, indirect=True)
def test_as_many_drafts_are_accepted(cluster: Cluster, client: Client, reference: Reference) -> None:
    prompts: list[Prompt] = [random_prompt(tokens, "drafts") for tokens in PROMPT_TOKENS]
    alone = accepted(reference.engine, reference.complete, prompts)
    assert accepted(cluster.decode[0], client.complete, prompts) == alone


@pytest.mark.parametrize(
    ("cluster", "tensor"),
    [(BOTH_MTP, MTP.layers), long(BOTH_EAGLE, ONE_LAYER.layers), long(BOTH_DRAFT_MODEL, TINY.layers)],
    ids=str,
    indirect=["cluster"],
)
def test_fewer_are_where_its_kv_is_lost(cluster: Cluster, client: Client, reference: Reference, tensor: int) -> None:
    """What the test above compares does tell whether the draft's KV was sent."""
    prompts: list[Prompt] = [random_prompt(LOSING_TOKENS + tensor, f"lose-{i}") for i in range(3)]
    alone = accepted(reference.engine, reference.complete, prompts)
    assert accepted(cluster.decode[0], client.complete, prompts) < alone / 2


@pytest.mark.parametrize("cluster", [long(NGRAM_TO_EAGLE), long(EAGLE_TO_NGRAM)], ids=str, indirect=True)
def test_a_draft_of_one_side_alone_is_not_sent(cluster: Cluster, client: Client) -> None:
    completion = client.complete(random_prompt(700, "one side"))
    assert completion.kv_transfer_params is not None
    assert completion.kv_transfer_params["received_bytes"] == 6 * 128 * ONE_LAYER.kv_bytes_per_token
    said = cluster.prefill[0].log.read_text().count("the draft's KV of prompts is not sent")
    assert said == (1 if cluster.config is NGRAM_TO_EAGLE else 0)
