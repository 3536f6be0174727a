# SPDX-License-Identifier: Apache-2.0
"""Guided requests beside plain ones, on a vllm-ascend decode engine with few blocks: all end.

A guided request waits for its grammar, while a plain one takes blocks. When the grammar is ready, the guided one is
first in line and does not fit. The plain one, whose KV has arrived by then, has to run all the same.

What guided requests say is not looked at: beside plain ones, vllm-ascend on emulated CANN does not always keep to a
grammar, as a single engine does not either.
"""

import dataclasses

import httpx
import pytest

from harness.agreement import assert_agree, listed_logprobs
from harness.client import Client, Completion, at_once, random_prompt
from harness.clusters import Cluster
from harness.failures import wait_all_blocks_free
from harness.models import TINY, for_npu
from harness.pool import Reference
from npu_engines import one_to_one

BLOCK = 128
MAX_MODEL_LEN = 1024
ANSWER_S = 90.0
"""All answers take some seconds."""

ROOMY = one_to_one("guided-few-blocks", 1, 1, args=("--structured-outputs-config", '{"backend": "xgrammar"}'))
FEW_BLOCKS = dataclasses.replace(
    ROOMY,
    decode=tuple(
        dataclasses.replace(
            decode, max_model_len=MAX_MODEL_LEN, kv_cache_bytes=10 * BLOCK * for_npu(TINY).kv_bytes_per_token
        )
        for decode in ROOMY.decode
    ),
)

pytestmark = [
    pytest.mark.npu,
    pytest.mark.long,
    pytest.mark.parametrize("cluster", [FEW_BLOCKS], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


def choices_of(number: int) -> list[str]:
    """Many and long ones, other ones for each request: their grammar takes some time to compile."""
    return [f"answer {number} {choice} " + "abcdefghij"[choice % 10] * 20 for choice in range(400)]


def test_guided_requests_do_not_hold_up_plain_ones(cluster: Cluster, reference: Reference) -> None:
    """Prompts of six and of four blocks, of which decode has nine."""
    plain = [random_prompt(480, f"plain-{i}") for i in range(4)]
    logprobs = listed_logprobs(reference.dtype)
    with Client(cluster.url, timeout=httpx.Timeout(ANSWER_S, connect=5), logprobs=logprobs) as client:

        def ask(number: int) -> Completion:
            if number % 2:
                return client.complete(plain[number // 2 % 4])
            schema = {"type": "string", "enum": choices_of(number)}
            body = {"structured_outputs": {"json": schema}, "ignore_eos": False}
            return client.complete(random_prompt(700, f"guided-{number}"), max_tokens=100, **body)

        for turn in range(3):
            answers = at_once(ask, range(8 * turn, 8 * turn + 8), concurrency=8)
            assert [answer.finish_reason for answer in answers[::2]] == 4 * ["stop"]
            assert_agree(reference, plain, answers[1::2])
    wait_all_blocks_free(cluster)
