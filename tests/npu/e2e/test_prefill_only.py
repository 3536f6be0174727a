# SPDX-License-Identifier: Apache-2.0
"""A vllm-ascend decode engine with `recompute_scheduler_enable` and few blocks: its preempted requests go back to
prefill, their streams go on, and clients get a single engine's tokens."""

import dataclasses

import pytest

from harness.agreement import assert_agree
from harness.client import Client, Completion, at_once, random_prompt
from harness.clusters import Cluster
from harness.failures import wait_all_blocks_free
from harness.models import TINY, for_npu
from harness.pool import Reference
from npu_engines import one_to_one

BLOCK = 128
ANSWER = 200
"""Tokens: a request that begins in one block ends in the third one."""

PLACES = (0, 60, 120, 184)
"""In an answer. Requests are preempted after the first ones."""

ROOMY = one_to_one("recompute-scheduler", 1, 1)
CLUSTER = dataclasses.replace(
    ROOMY,
    decode=tuple(
        dataclasses.replace(
            decode,
            who_computes=None,
            max_model_len=640,
            kv_cache_bytes=9 * BLOCK * for_npu(TINY).kv_bytes_per_token,
            args=("--additional-config", '{"recompute_scheduler_enable": true}'),
        )
        for decode in ROOMY.decode
    ),
)

pytestmark = [
    pytest.mark.npu,
    pytest.mark.parametrize("cluster", [CLUSTER], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def part(answer: Completion, place: int) -> Completion:
    """The tokens from `place` on, as many as the single engine is asked for."""
    tokens, logprobs = answer.token_ids[place : place + 16], answer.logprobs[place : place + 16]
    return dataclasses.replace(answer, token_ids=tokens, logprobs=logprobs)


def test_preempted_requests_go_back_to_prefill(cluster: Cluster, client: Client, reference: Reference) -> None:
    [decode] = cluster.decode
    prompts = [random_prompt(100 + 7 * i, f"preempted-{i}") for i in range(8)]
    answers = at_once(
        lambda prompt: client.complete(prompt, ANSWER, stream=bool(prompts.index(prompt) % 2)), prompts, concurrency=8
    )
    assert [len(answer.token_ids) for answer in answers] == len(prompts) * [ANSWER]
    # Near-ties end a comparison, so answers are compared from several places on.
    known = [[*prompt, *a.token_ids[:place]] for prompt, a in zip(prompts, answers, strict=True) for place in PLACES]
    assert_agree(reference, known, [part(a, place) for a in answers for place in PLACES])
    assert decode.metric("vllm:num_preemptions_total") >= 2
    samples = decode.samples("vllm:kv_pd_prompts_total")
    placed = {(labels["by"], labels["reason"]) for labels, count in samples if count}
    assert (
        {("prefill", "policy"), ("prefill", "preempted")}
        <= placed
        <= {
            ("prefill", "policy"),
            ("prefill", "preempted"),
            ("decode", "cached"),
        }
    )
    log = decode.log.read_text()
    assert "this engine computes no prompts, as with who_computes never" in log
    assert "Recompute preemption offload enabled" in log
    assert "falls back without offload" not in log
    wait_all_blocks_free(cluster)
