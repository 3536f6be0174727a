# SPDX-License-Identifier: Apache-2.0
"""Long prompts, which prefill computes before decode gives them memory, behind our proxy: the answers equal a single
engine's."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig, one_to_one
from harness.engines import Engine, EngineConfig, wait_ready
from harness.failures import wait_all_blocks_free
from harness.models import MAMBA, SLIDING, TINY
from harness.pool import Reference, long
from harness.waiting import wait_until

FIRST = 512
OUTPUT_TOKENS = 200
"""So that decode has no room for a while."""
TIMES = (("lease_s", 10.0), ("write_timeout_s", 5.0), ("grant_timeout_s", 20.0), ("control_timeout_s", 2.0))
"""Short, so that an engine that died is not waited for long."""


def long_first(config: ClusterConfig, first_tokens: int | str = FIRST, **of_decode: object) -> ClusterConfig:
    """`config`, with a decode engine that has prefill compute long prompts first."""
    [decode] = config.decode
    extra = (*decode.connector_extra, ("prefill_first_tokens", first_tokens))
    decode = dataclasses.replace(decode, connector_extra=extra, **of_decode)
    return dataclasses.replace(config, name=f"{config.name}-long-prompts-first", decode=(decode,))


PLAIN = one_to_one(1, 1)
NEVER = dataclasses.replace(PLAIN, name="never")
CLUSTER = long_first(PLAIN, "auto")
"""As by default: the proxy learns prefill's step, which has `FIRST` tokens."""
OTHERS = [
    long_first(NEVER, who_computes="never"),
    long_first(one_to_one(2, 1, model=SLIDING)),
    long_first(one_to_one(2, 1, model=MAMBA, engine=EngineConfig(prefix_caching=False))),
]
_PREFILL = dataclasses.replace(PLAIN.prefill[0], connector_extra=TIMES)
_DECODE = dataclasses.replace(PLAIN.decode[0], connector_extra=TIMES, kv_cache_bytes=TINY.kv_bytes_per_token * 36 * 128)
TWO = long_first(dataclasses.replace(PLAIN, name="two-prefill", prefill=(_PREFILL, _PREFILL), decode=(_DECODE,)))
"""Decode has room for one long prompt."""

pytestmark = pytest.mark.timeout(600)  # the first test of a cluster starts it


@pytest.mark.parametrize("cluster", [long(CLUSTER)], ids=str, indirect=True)
def test_what_is_long_is_learned(client: Client, cluster: Cluster) -> None:
    """Until then, such a prompt is sent while it is computed."""
    early = [client.complete(random_prompt(3000, "before")).kv_transfer_params["bytes_before_prefill_end"]]
    wait_until(lambda: cluster.prefill[0].metric("vllm:kv_pd_prefill_first_tokens") == FIRST, 60)
    while early[-1] and len(early) < 100:
        time.sleep(0.2)  # the proxy reads metrics at intervals
        prompt = random_prompt(3000, f"after {len(early)}")
        early.append(client.complete(prompt).kv_transfer_params["bytes_before_prefill_end"])
    assert early[0] > 0
    assert early[-1] == 0


@pytest.mark.parametrize("cluster", [long(config) for config in (CLUSTER, *OTHERS)], ids=str, indirect=True)
def test_tokens(client: Client, cluster: Cluster, reference: Reference) -> None:
    """Both orders at once."""
    prompts = [random_prompt(tokens, "long") for tokens in (FIRST - 1, FIRST, FIRST + 1, 700, 1500, 2500, 3000, 3500)]
    answers = at_once(client.complete, prompts, concurrency=len(prompts))
    assert [answer.token_ids for answer in answers] == [reference.complete(prompt) for prompt in prompts]
    assert all(answer.kv_transfer_params["received_bytes"] > 0 for answer in answers)
    streams = [random_prompt(tokens, "long stream") for tokens in (300, 2000)]
    streamed = at_once(lambda prompt: client.complete(prompt, stream=True).token_ids, streams, concurrency=2)
    assert streamed == [reference.complete(prompt) for prompt in streams]
    wait_all_blocks_free(cluster)


@pytest.mark.parametrize("cluster", [long(CLUSTER)], ids=str, indirect=True)
def test_more_prompts_than_decode_has_room_for(client: Client, cluster: Cluster, reference: Reference) -> None:
    prompts = [random_prompt(3000, f"crowd {number}") for number in range(20)]
    answers = at_once(client.complete, prompts, concurrency=len(prompts))
    assert [answer.token_ids for answer in answers] == [reference.complete(prompt) for prompt in prompts]
    wait_all_blocks_free(cluster)


def held_blocks(prefill: Engine) -> float:
    """Returns how many blocks an engine keeps that computes nothing; 0 if it computes."""
    if prefill.metric("vllm:num_requests_running") or prefill.metric("vllm:num_requests_waiting"):
        return 0
    [(labels, _)] = prefill.samples("vllm:cache_config_info")
    return prefill.metric("vllm:kv_cache_usage_perc") * int(labels["num_gpu_blocks"])


@pytest.mark.parametrize("cluster", [long(TWO)], ids=str, indirect=True)
def test_prefill_dies_while_it_holds_prompts(client: Client, cluster: Cluster, reference: Reference) -> None:
    """Decode has no room for them. The other prefill engine computes them again."""
    prompts = [random_prompt(2500, f"held {number}") for number in range(8)]
    dies = cluster.prefill[0]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(client.complete, prompt, OUTPUT_TOKENS) for prompt in prompts]
        wait_until(lambda: held_blocks(dies) > 2500 // 128, 120)
        dies.process.kill()
        answers = [each.result() for each in asked]
    assert [answer.token_ids for answer in answers] == [reference.complete(prompt, OUTPUT_TOKENS) for prompt in prompts]
    dies.start()
    wait_ready([dies])
    wait_all_blocks_free(cluster)
