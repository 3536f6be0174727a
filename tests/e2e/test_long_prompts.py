# SPDX-License-Identifier: Apache-2.0
"""Long prompts, which prefill computes before decode gives them memory, behind our proxy: the answers equal a single
engine's."""

import dataclasses

import pytest

from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster, one_to_one
from harness.failures import wait_all_blocks_free
from harness.pool import long

FIRST = 512
_PLAIN = one_to_one(1, 1)
_DECODE = dataclasses.replace(
    _PLAIN.decode[0], connector_extra=(*_PLAIN.decode[0].connector_extra, ("prefill_first_tokens", FIRST))
)
LONG_FIRST = dataclasses.replace(_PLAIN, name="long-prompts-first", decode=(_DECODE,))

pytestmark = [
    pytest.mark.parametrize("cluster", [long(LONG_FIRST)], ids=str, indirect=True),
    pytest.mark.timeout(600),  # the first test starts it
]


def test_tokens(client: Client, cluster: Cluster, reference) -> None:
    """Both orders at once."""
    prompts = [random_prompt(tokens, "long") for tokens in (FIRST - 1, FIRST, FIRST + 1, 700, 1500, 2500, 3000, 3500)]
    answers = at_once(client.complete, prompts, concurrency=len(prompts))
    assert [answer.token_ids for answer in answers] == [reference.complete(prompt) for prompt in prompts]
    assert all(answer.kv_transfer_params["received_bytes"] > 0 for answer in answers)
    streams = [random_prompt(tokens, "long stream") for tokens in (300, 2000)]
    streamed = at_once(lambda prompt: client.complete(prompt, stream=True).token_ids, streams, concurrency=2)
    assert streamed == [reference.complete(prompt) for prompt in streams]
    wait_all_blocks_free(cluster)


def test_more_prompts_than_decode_has_room_for(client: Client, cluster: Cluster, reference) -> None:
    prompts = [random_prompt(3000, f"crowd {number}") for number in range(20)]
    answers = at_once(client.complete, prompts, concurrency=len(prompts))
    assert [answer.token_ids for answer in answers] == [reference.complete(prompt) for prompt in prompts]
    wait_all_blocks_free(cluster)
