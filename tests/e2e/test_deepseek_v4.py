# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4 on vLLM's CPU backend, from one engine to another: the tokens of a single one.

vLLM's model and kernels for CPUs run as they are, but for what `tests/plugins/without_triton.py` replaces. They need a
CPU with AMX.
"""

import httpx
import pytest

from harness.client import Client, Completion, at_once, random_prompt
from harness.clusters import LOSING_TOKENS, Cluster, one_to_one
from harness.deepseek_v4 import DEEPSEEK_V4, FOR_V4
from harness.failures import wait_all_blocks_free
from harness.pool import Reference, long

TP1 = one_to_one(1, 1, model=DEEPSEEK_V4, engine=FOR_V4)
TP2_TO_1 = one_to_one(2, 1, model=DEEPSEEK_V4, engine=FOR_V4)
NEAR_TIE = 0.5
"""bfloat16 rounds otherwise where tokens are computed in other steps, or beside others: right tokens are up to 0.1 less
likely than the single engine's, those without one of the tensors below 1.0 to 13, or their logits are no numbers."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def can_run() -> None:
    """Skips the tests where they cannot run. It imports vLLM, which the short form need not do here."""
    import torch

    pytest.importorskip("vllm.models.deepseek_v4.cpu", reason="this vLLM has no DeepSeek V4 for CPUs")
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")


def shortfalls(reference: Reference, prompts: list[list[int]], completions: list[Completion]) -> list[float]:
    """Returns by how much each answer's tokens are less likely than the single engine's."""
    answers = zip(prompts, completions, strict=True)
    return [reference.shortfall(prompt, completion.token_ids) for prompt, completion in answers]


def received(completion: Completion) -> int:
    assert completion.kv_transfer_params is not None
    return int(completion.kv_transfer_params["received_bytes"])


@pytest.mark.parametrize("cluster", [long(TP1), long(TP2_TO_1)], ids=str, indirect=True)
def test_prompts_of_many_lengths(cluster: Cluster, client: Client, reference: Reference) -> None:
    """Shorter than a window, within entries and blocks and at their ends, chunked, and with a prefix that is cached."""
    lengths = (1, 2, 3, 127, 128, 129, 255, 256, 257, 384, 600, 1001, 1537, 1900)
    prompts = [random_prompt(tokens, "alone") for tokens in lengths]
    prompts += [[*prompts[-2], *random_prompt(100, "a next turn")]]
    alone = [client.complete(prompt) for prompt in prompts]
    assert max(shortfalls(reference, prompts, alone)) <= NEAR_TIE
    assert received(alone[-1]) < received(alone[-3]), "decode has cached 1536 tokens of it, with their windows"
    at_a_time = at_once(lambda prompt: client.complete(prompt, stream=True), prompts, concurrency=6)
    assert max(shortfalls(reference, prompts, at_a_time)) <= NEAR_TIE
    wait_all_blocks_free(cluster)


@pytest.mark.parametrize("cluster", [long(TP1)], ids=str, indirect=True)
def test_tensors_matter(client: Client, reference: Reference) -> None:
    """That tokens are right would mean little if they were right without it: windows, both kinds of entries, and what
    an unfinished entry is computed from. The index is not read before a context of 2048 tokens."""

    def unnoticed(tensor: int) -> bool:
        prompt = random_prompt(LOSING_TOKENS + tensor + 1, "lose")
        try:
            return shortfalls(reference, [prompt], [client.complete(prompt)]) < [NEAR_TIE]
        except httpx.HTTPStatusError:  # vLLM cannot say log probabilities that are no numbers
            return False

    assert [tensor for tensor in (0, 1, 2, 4, 5, 8) if unnoticed(tensor)] == []
