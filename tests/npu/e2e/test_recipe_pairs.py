# SPDX-License-Identifier: Apache-2.0
"""Pairs of vllm-ascend's guides, as `vllm-ascend-pd migrate` changes them, started on vllm-ascend.

The emulated NPU has no quantized weights, routed experts, captured graphs or MTP. So the pairs run a model of the same
attention with dense layers, without the options for these, and with parallel sizes divided.
"""

import json

import pytest

from harness.agreement import assert_agree
from harness.ascend import NO_NZ
from harness.client import Client, at_once, random_prompt
from harness.clusters import ClusterConfig
from harness.engines import PATIENT, EngineConfig, Role
from harness.models import MLA, TINY, ModelSpec
from harness.pool import long
from harness.recipes import Recipe, recipes
from npu_engines import cluster_of

# Options of recipes that are for what the emulated NPU does not have, or that the harness gives itself.
_NOT_HERE = {
    "--quantization": "quantized weights",
    "--speculative-config": "MTP",
    "--compilation-config": "captured graphs",
    "--enable-expert-parallel": "routed experts",
    "--hf-overrides": "the model",
    "--gpu-memory-utilization": "memory",
    "--safetensors-load-strategy": "the model",
    "--kv-transfer-config": "the harness",
    "--tensor-parallel-size": "divided",
    "--data-parallel-size": "divided",
    "--data-parallel-rank": "divided",
    "--data-parallel-size-local": "divided",
    "--max-model-len": "the model",
    "--reasoning-parser": "the model",
    "--tool-call-parser": "the model",
    "--enable-auto-tool-choice": "the model",
    "--enable-prefix-caching": "the harness",
    "--no-enable-prefix-caching": "the harness",
    "--max-num-batched-tokens": "the harness",
    "--enforce-eager": "the harness",
}
_EXPERTS = ("finegrained_tp_config", "enable_shared_expert_dp", "enable_fused_mc2", "enable_flashcomm1")
"""Keys of --additional-config that are for routed experts, or for data-parallel engines that share them."""


def engine(number: int, role: Role, tp: int) -> EngineConfig:
    """The engine of a recipe, with what remains of its options."""
    recipe = _recipe(number, role)
    options = {words[0]: words[1:] for words in recipe.migrated.command[1:]}
    additional = json.loads(options.pop("--additional-config", ["{}"])[0])
    additional = json.loads(NO_NZ) | {name: value for name, value in additional.items() if name not in _EXPERTS}
    kept = [word for name, words in options.items() if name not in _NOT_HERE for word in (name, *words)]
    ours = recipe.migrated.kv_transfer_config.get("kv_connector_extra_config", {})
    return EngineConfig(
        role,
        tp=tp,
        prefix_caching="--no-enable-prefix-caching" not in options,
        max_num_batched_tokens=min(4096, int(options["--max-num-batched-tokens"][0])),
        args=(*kept, "--additional-config", json.dumps(additional)),
        connector_extra=(*PATIENT, *ours.items()),
        who_computes=None,
    )


def _recipe(number: int, role: Role) -> Recipe:
    recipe = recipes()[number - 1]
    assert recipe.side == {Role.PREFILL: "prefill", Role.DECODE: "decode"}[role]
    return recipe


def pair(name: str, prefill: int, decode: int, model: ModelSpec, prefill_tp: int) -> ClusterConfig:
    engines = engine(prefill, Role.PREFILL, prefill_tp), engine(decode, Role.DECODE, 1)
    return cluster_of(f"recipe-{name}", engines[:1], engines[1:], model)


PAIRS = [
    long(pair("deepseek-r1", 5, 8, MLA, prefill_tp=2)),
    long(pair("glm-4.7", 34, 36, TINY, prefill_tp=2)),
    pair("kimi-k2", 56, 58, MLA, prefill_tp=1),
    long(pair("qwen3", 68, 69, TINY, prefill_tp=2)),
]
"""By the numbers that docs/recipes.md gives to recipes."""

pytestmark = [pytest.mark.npu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("cluster", PAIRS, ids=str, indirect=True)
def test_answers(client: Client, reference) -> None:
    """Short prompts, those of several steps, and several at a time."""
    prompts = [random_prompt(tokens, "recipe") for tokens in (1, 128, 300, 1000, 2500)]
    assert_agree(reference, prompts, [client.complete(prompt) for prompt in prompts])
    others = [random_prompt(tokens, f"recipe-{tokens}") for tokens in (5, 129, 384, 700)]
    assert_agree(reference, others, at_once(client.complete, others, concurrency=4))
