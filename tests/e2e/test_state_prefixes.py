# SPDX-License-Identifier: Apache-2.0
"""Models with states and prefix caching on both sides: conversations whose turns start from states at block boundaries.

vLLM caches a state where a step ends with a block: on prefill at the last boundary of each prompt, on decode where
generated tokens cross one. Since 0.30 it forgets the latter, unless it is told how many to keep.
"""

import dataclasses

import pytest
from test_models import is_right

from harness.client import Client, at_once, random_prompt
from harness.clusters import PLAIN, Cluster, ClusterConfig, one_to_one
from harness.engines import EngineConfig
from harness.models import GATED_DELTA, MAMBA, ModelSpec
from harness.pool import Reference, long

BLOCK = 128
IN_BFLOAT16 = dataclasses.replace(PLAIN, dtype="bfloat16")


def caching(tp: int, model: ModelSpec, engine: EngineConfig, block: int) -> ClusterConfig:
    """Decode caches a state at each boundary. `block`: tokens of a block."""
    sides = one_to_one(tp, 1, model=model, engine=engine)
    prefill, decode = (
        dataclasses.replace(side, connector_extra=(*side.connector_extra, ("verify_kv", "all")))
        for side in (*sides.prefill, *sides.decode)
    )
    decode = dataclasses.replace(decode, args=(*decode.args, "--prefix-cache-retention-interval", str(block)))
    return dataclasses.replace(sides, name=f"prefixes-{sides.name}", prefill=(prefill,), decode=(decode,))


CLUSTERS = [
    caching(1, MAMBA, PLAIN, BLOCK),
    long(caching(2, MAMBA, PLAIN, BLOCK)),
    long(caching(1, GATED_DELTA, IN_BFLOAT16, 2 * BLOCK)),
    long(caching(2, GATED_DELTA, IN_BFLOAT16, 2 * BLOCK)),
]

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("prefill_computes")]

all_clusters = pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)


def hits(cluster: Cluster) -> tuple[float, float]:
    """How many tokens prefill and decode have found in their prefix caches."""
    prefill, decode = (side[0].metric("vllm:prefix_cache_hits_total") for side in (cluster.prefill, cluster.decode))
    return prefill, decode


def converse(cluster: Cluster, client: Client, reference: Reference, prompt: list[int], turns: int, said: int) -> None:
    """Each turn has what was said so far and more. `said`: how many tokens each answer and each question has."""
    for turn in range(turns):
        answer = client.complete(prompt, max_tokens=said).token_ids
        if cluster.decode[0].config.dtype == "float32":
            assert answer == reference.complete(prompt, max_tokens=said), f"turn {turn} of {len(prompt)} tokens"
        else:
            assert is_right(cluster, reference, prompt, answer), f"turn {turn} of {len(prompt)} tokens"
        prompt = [*prompt, *answer, *random_prompt(said, f"turn {turn}")]


@all_clusters
@pytest.mark.parametrize("tokens", [110, BLOCK, BLOCK + 1, 700])
def test_a_conversation(cluster: Cluster, client: Client, reference: Reference, tokens: int) -> None:
    """Answers are short of a block, so that some turns cross a boundary on decode and some do not."""
    before = hits(cluster)
    converse(cluster, client, reference, random_prompt(tokens, f"conversation {tokens}"), turns=5, said=50)
    after = hits(cluster)
    assert after[0] > before[0], "prefill has started from a cached state"
    assert after[1] > before[1], "decode has started from a cached state"
    verified = {labels["result"]: n for labels, n in cluster.decode[0].samples("vllm:kv_pd_verified_total")}
    assert verified.pop("right") > 0
    assert not any(verified.values()), verified


@all_clusters
def test_conversations_at_a_time(cluster: Cluster, client: Client, reference: Reference) -> None:
    def converse_about(number: int) -> None:
        prompt = random_prompt(90 * number + 37, f"one of many {number}")
        converse(cluster, client, reference, prompt, turns=3, said=40)

    at_once(converse_about, list(range(8)), concurrency=4)


@all_clusters
@pytest.mark.parametrize("tokens", [BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_the_same_prompt_again(cluster: Cluster, client: Client, reference: Reference, tokens: int) -> None:
    """At a boundary, prefill computes one token less than its prompt's last block, and decode starts from its own."""
    prompt = random_prompt(tokens, f"again {tokens}")
    for _ in range(3):
        assert is_right(cluster, reference, prompt, client.complete(prompt).token_ids)
