# SPDX-License-Identifier: Apache-2.0
"""In bfloat16 `harness.agreement` passes what rounding does to answers, and finds small faults of a KV cache."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from harness.agreement import LISTED, compare
from harness.client import Completion, random_prompt
from harness.models import TINY, for_npu, make_model

BLOCK = 128
PROMPTS = [random_prompt(tokens, "agreement") for tokens in (129, 260)]
LAST = TINY.layers - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = make_model(for_npu(TINY), tmp_path_factory.mktemp("models"))
    with torch.inference_mode():
        yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def prefill(model: Any, prompt: list[int]) -> DynamicCache:
    """The KV of all tokens but the last."""
    cache = DynamicCache()
    model(torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True)
    return cache


def decode(model: Any, cache: DynamicCache, last: int) -> Completion:
    tokens: list[int] = []
    listed = []
    for _ in range(6):
        output = model(torch.tensor([[last]]), past_key_values=cache, use_cache=True)
        values, ids = output.logits[0, -1].float().log_softmax(-1).topk(LISTED)
        listed.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
        last = int(ids[0])
        tokens.append(last)
    return Completion(tuple(tokens), "", "length", logprobs=tuple(listed))


@pytest.fixture(scope="module")
def expected(model: Any) -> list[Completion]:
    return [decode(model, prefill(model, prompt), prompt[-1]) for prompt in PROMPTS]


def disagreements(ours: list[Completion], theirs: list[Completion]) -> list[str]:
    return [why for mine, other in zip(ours, theirs, strict=True) if (why := compare(mine, other)[1])]


def in_halves(linear: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    """As two tensor-parallel ranks compute it: each one's sum is rounded before they are added."""
    halves = linear.weight.chunk(2, dim=1)
    return lambda x: sum(part @ half.T for part, half in zip(x.chunk(2, dim=-1), halves, strict=True))


def test_another_order_of_sums_agrees(model: Any, expected: list[Completion], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                patch.setattr(linear, "forward", in_halves(linear))
        caches = [prefill(model, prompt) for prompt in PROMPTS]
    ours = [decode(model, cache, prompt[-1]) for cache, prompt in zip(caches, PROMPTS, strict=True)]
    assert any(mine.logprobs != other.logprobs for mine, other in zip(ours, expected, strict=True))
    assert disagreements(ours, expected) == []


def lose_a_head_of_a_block(cache: DynamicCache) -> None:
    layer = cache.layers[2]
    for part in (layer.keys, layer.values):
        part[:, 1, :BLOCK] = 0


def swap_heads(cache: DynamicCache) -> None:
    layer = cache.layers[LAST]
    layer.keys, layer.values = (part[:, [1, 0, 2, 3]].clone() for part in (layer.keys, layer.values))


def disorder_the_values_of_a_head(cache: DynamicCache) -> None:
    values = cache.layers[LAST].values
    values[:, 1, :BLOCK] = values[:, 1, :BLOCK].flip(1)


def take_the_keys_of_another_block(cache: DynamicCache) -> None:
    keys = cache.layers[1].keys
    keys[:, :, : BLOCK // 2] = keys[:, :, BLOCK // 2 : BLOCK].clone()


FAULTS = [lose_a_head_of_a_block, swap_heads, disorder_the_values_of_a_head, take_the_keys_of_another_block]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_cache_is_found(
    model: Any, expected: list[Completion], fault: Callable[[DynamicCache], None]
) -> None:
    caches = [prefill(model, prompt) for prompt in PROMPTS]
    for cache in caches:
        fault(cache)
    ours = [decode(model, cache, prompt[-1]) for cache, prompt in zip(caches, PROMPTS, strict=True)]
    assert disagreements(ours, expected)
