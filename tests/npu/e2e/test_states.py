# SPDX-License-Identifier: Apache-2.0
"""States of linear attention: Qwen3.5 on vllm-ascend, which announces its gated delta nets without a name."""

import dataclasses

import pytest

from harness.agreement import assert_agree
from harness.ascend import UNPINNED
from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.engines import EngineConfig
from harness.pool import long
from harness.timelines import prefill_ranks, steps, traced_requests
from harness.vision import LANGUAGE_ONLY, QWEN3_5
from npu_engines import on_npu, one_to_one

PROMPT_TOKENS = (1, 129, 300, 700)
"""The last one takes two steps. A state that is sent before its layer has run is that of the first 512 tokens."""

pytestmark = [pytest.mark.npu, pytest.mark.timeout(600)]


def qwen3_5(name: str, prefill_tp: int) -> ClusterConfig:
    config = one_to_one(name, prefill_tp, 1, args=LANGUAGE_ONLY, env=UNPINNED, model=QWEN3_5)
    [prefill] = config.prefill
    return dataclasses.replace(
        config,
        prefill=(dataclasses.replace(prefill, traces=name),),
        single=on_npu(EngineConfig(args=LANGUAGE_ONLY, env=UNPINNED)),
    )


CLUSTERS = [
    qwen3_5("qwen3.5-tp1-to-tp1", 1),
    long(qwen3_5("qwen3.5-tp2-to-tp1", 2)),
]
all_clusters = pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)


def sent(cluster: Cluster, client: Client, tokens: int, seed: str) -> list[tuple[int, ...]]:
    """Returns for each rank the numbers of layers in the order in which they left, in a prompt's last step."""
    body = {"model": str(cluster.model), "prompt": random_prompt(tokens, seed), "max_tokens": 2, "temperature": 0}
    name = f"{client.http.post('/v1/completions', json=body).raise_for_status().json()['id']}-0"
    recordings, requests = traced_requests(
        cluster.prefill[0].traces, lambda all: any(name in request.names and request.bytes for request in all)
    )
    [transfer] = [request.transfer for request in requests if name in request.names]
    orders = []
    for rank in prefill_ranks(recordings):
        *_, last = (
            layers for begin, _, layers in steps(rank) if any(part.transfer == transfer for part in begin.args.parts)
        )
        orders.append(tuple(int(event.args.layer.split(".layers.")[1].split(".")[0]) for event in last))
    return orders


@all_clusters
def test_answers_are_those_of_a_single_engine(client: Client, reference) -> None:
    prompts = [random_prompt(tokens, "state") for tokens in PROMPT_TOKENS]
    assert_agree(reference, prompts, at_once(client.complete, prompts, concurrency=2))


def cached(cluster: Cluster) -> list[float]:
    """How many tokens prefill and decode have found in their prefix caches."""
    return [side[0].metric("vllm:prefix_cache_hits_total") for side in (cluster.prefill, cluster.decode)]


@all_clusters
def test_a_conversation(cluster: Cluster, client: Client, reference) -> None:
    """Turns start from states that either side has cached at boundaries of blocks."""
    before, prompt = cached(cluster), random_prompt(505, "conversation")
    for turn in range(2):
        answer = client.complete(prompt)
        assert_agree(reference, [prompt], [answer])
        prompt = [*prompt, *answer.token_ids, *random_prompt(20, f"turn {turn}")]
    assert all(now > then for now, then in zip(cached(cluster), before, strict=True))


@all_clusters
def test_states_leave_when_the_step_ends(cluster: Cluster, client: Client) -> None:
    """Behind the layers that vllm-ascend names."""
    kinds = dict(cluster.config.model.config)["layer_types"]
    assert isinstance(kinds, tuple)
    named = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    for order in sent(cluster, client, 700, "states"):
        assert sorted(order) == [*range(len(kinds))]
        assert [*order[: len(named)]] == named
