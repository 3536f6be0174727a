# SPDX-License-Identifier: Apache-2.0
"""Prompts whose tickets come straight from decode, after a router has asked prefill first, or both at once."""

import pytest
from test_one_to_one import TP2_TO_TP1

from harness.agreement import assert_agree, listed_logprobs
from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster
from harness.failures import wait_all_blocks_free
from harness.routers import Flow, stand_in

PROMPT_TOKENS = (2, 128, 129, 327, 1000)

pytestmark = [pytest.mark.npu, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("cluster", [TP2_TO_TP1], ids=str, indirect=True)
@pytest.mark.parametrize("flow", [Flow.VLLM_NIXL, Flow.VLLM_MOONCAKE], ids=["prefill-first", "both-at-once"])
def test_answers_are_those_of_a_single_engine(flow: Flow, cluster: Cluster, client: Client, reference) -> None:
    [prefill], [decode] = cluster.prefill, cluster.decode
    prompts = [random_prompt(tokens, f"{flow} {tokens}") for tokens in PROMPT_TOKENS]
    with (
        stand_in(flow, prefill, decode) as router,
        Client(router.url, model=client.model, logprobs=listed_logprobs(reference.dtype)) as through,
    ):
        answers = at_once(through.complete, prompts, concurrency=3)
    assert_agree(reference, prompts, answers)
    assert all(answer.kv_transfer_params["received_bytes"] > 0 for answer in answers)
    wait_all_blocks_free(cluster)
