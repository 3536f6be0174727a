# SPDX-License-Identifier: Apache-2.0
"""Pipeline and data parallelism on either side, several engines of each kind, more ranks than KV heads, sizes that do
not divide each other, engines that differ in memory, sliding windows: the answers of a single engine.

Every cluster serves the same few prompts: one block's end, several blocks, several chunks of 512 tokens.
"""

import dataclasses

import pytest

from harness.agreement import assert_agree
from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster
from harness.engines import PATIENT, EngineConfig, Role
from harness.metrics import requests_are_seen_everywhere
from harness.models import ONE_HEAD, SIX_HEADS, SLIDING
from harness.pool import long
from npu_engines import cluster_of

PROMPT_TOKENS = (1, 127, 128, 129, 700, 1300)

PREFILL = EngineConfig(Role.PREFILL, connector_extra=PATIENT)
DECODE = EngineConfig(Role.DECODE, connector_extra=PATIENT)


def with_layers(config: EngineConfig, partition: str) -> EngineConfig:
    """With so many layers in each pipeline stage."""
    return dataclasses.replace(config, env=(*config.env, ("VLLM_PP_LAYER_PARTITION", partition)))


def shaped(config: EngineConfig, tp: int = 1, pp: int = 1, dp: int = 1) -> EngineConfig:
    args = ("--api-server-count", "1") if dp > 1 else ()  # vLLM starts one for each engine otherwise
    return dataclasses.replace(config, tp=tp, pp=pp, dp=dp, args=(*config.args, *args))


PIPELINES = [
    long(cluster_of("tp1-to-pp2", [PREFILL], [shaped(DECODE, pp=2)])),
    long(
        cluster_of(
            "pp2-to-pp2-with-other-layers", [with_layers(shaped(PREFILL, pp=2), "1,3")], [shaped(DECODE, tp=2, pp=2)]
        )
    ),
]
PP2_TP2_TO_DP2 = cluster_of("pp2tp2-to-dp2", [shaped(PREFILL, tp=2, pp=2)], [shaped(DECODE, dp=2)])
DATA_PARALLEL = [
    PP2_TP2_TO_DP2,
    long(cluster_of("dp2-to-tp1", [shaped(PREFILL, dp=2)], [DECODE])),
]
# 48 MiB a rank instead of 64, and other limits on what runs at once.
SMALLER = dataclasses.replace(DECODE, kv_cache_bytes=48 << 20, args=("--max-num-seqs", "6"))
HEADS = [
    long(cluster_of("one-head-tp2-to-tp1", [shaped(PREFILL, tp=2)], [DECODE], ONE_HEAD)),
    long(cluster_of("one-head-tp1-to-tp2", [PREFILL], [shaped(DECODE, tp=2)], ONE_HEAD)),
    long(cluster_of("one-head-tp2-to-tp2", [shaped(PREFILL, tp=2)], [shaped(DECODE, tp=2)], ONE_HEAD)),
]
UNEVEN = long(cluster_of("six-heads-tp3-to-tp2-smaller", [shaped(PREFILL, tp=3)], [shaped(SMALLER, tp=2)], SIX_HEADS))
WINDOWS = [
    long(cluster_of("sliding-tp1-to-tp1", [PREFILL], [DECODE], SLIDING)),
    long(cluster_of("sliding-tp2-to-tp1", [shaped(PREFILL, tp=2)], [DECODE], SLIDING)),
]
TWO_OF_EACH = long(cluster_of("2p2d", [PREFILL, shaped(PREFILL, tp=2)], [DECODE, shaped(DECODE, tp=2)]))

pytestmark = [pytest.mark.npu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("cluster", [*PIPELINES, *DATA_PARALLEL, TWO_OF_EACH, *HEADS, *WINDOWS], ids=str, indirect=True)
def test_answers_are_those_of_a_single_engine(cluster: Cluster, client: Client, reference) -> None:
    prompts = [random_prompt(tokens, f"parallel-{i}") for i, tokens in enumerate(2 * PROMPT_TOKENS)]
    completions = at_once(lambda prompt: client.complete(prompt, stream=True), prompts, concurrency=8)
    assert_agree(reference, prompts, completions)


@pytest.mark.parametrize("cluster", [UNEVEN], ids=str, indirect=True)
def test_sizes_that_do_not_divide_each_other(cluster: Cluster, client: Client, reference) -> None:
    """Few tokens: each one's heads are written by themselves."""
    prompts = [random_prompt(tokens, "uneven") for tokens in (1, 127, 129)]
    completions = at_once(client.complete, prompts, concurrency=2)
    assert_agree(reference, prompts, completions)


@pytest.mark.parametrize("cluster", DATA_PARALLEL, ids=str, indirect=True)
def test_every_data_parallel_engine_takes_part(cluster: Cluster, client: Client, reference) -> None:
    """vLLM spreads requests that overlap: with every one of them right, tickets reached the engine they name."""
    prompts = [random_prompt(300, f"spread-{i}") for i in range(8)]
    completions = at_once(client.complete, prompts, concurrency=8)
    assert_agree(reference, prompts, completions)
    for engine in [*cluster.prefill, *cluster.decode]:
        served = engine.samples("vllm:request_success_total")
        busy = {labels["engine"] for labels, count in served if count > 0}
        assert len(busy) == engine.config.dp


@pytest.mark.parametrize("cluster", [PP2_TP2_TO_DP2], ids=str, indirect=True)
def test_requests_are_seen_everywhere(cluster: Cluster, client: Client) -> None:
    """By `/metrics`. vLLM 0.23 asks the scheduler for metrics only if a rank has some."""
    requests_are_seen_everywhere(cluster, client)
