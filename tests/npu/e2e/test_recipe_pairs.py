# SPDX-License-Identifier: Apache-2.0
"""Pairs of vllm-ascend's guides, as `vllm-ascend-pd migrate` changes them, started on vllm-ascend.

The emulated NPU has no quantized weights, routed experts, captured graphs or MTP. So the pairs run a model of the same
attention with dense layers, without the options for these, and with parallel sizes divided.
"""

import dataclasses
import json
from dataclasses import dataclass

import pytest

from harness.agreement import assert_agree
from harness.ascend import NO_NZ, UNPINNED
from harness.client import Client, at_once, random_prompt
from harness.clusters import ClusterConfig
from harness.engines import PATIENT, EngineConfig, Role
from harness.models import MLA, TINY, ModelSpec
from harness.pool import long
from harness.recipes import STARTED, Recipe, recipes
from harness.vision import ONE_IMAGE, VISION
from npu_engines import cluster_of, on_npu

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
    "--mm-encoder-tp-mode": "the model",
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


@dataclass(frozen=True)
class Shape:
    """How a pair runs here. `args` and `env`: of both engines."""

    model: ModelSpec
    prefill_tp: int = 1
    decode_dp: int = 1
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


def engine(recipe: Recipe, role: Role, tp: int, dp: int, more: Shape) -> EngineConfig:
    """The engine of a recipe, with what remains of its options."""
    options = {words[0]: words[1:] for words in recipe.migrated.command[1:]}
    additional = json.loads(options.pop("--additional-config", ["{}"])[0])
    additional = json.loads(NO_NZ) | {name: value for name, value in additional.items() if name not in _EXPERTS}
    if dp > 1:  # vLLM starts one for each engine otherwise
        options["--api-server-count"] = ["1"]
    kept = [word for name, words in options.items() if name not in _NOT_HERE for word in (name, *words)]
    ours = recipe.migrated.kv_transfer_config.get("kv_connector_extra_config", {})
    return EngineConfig(
        role,
        tp=tp,
        dp=dp,
        prefix_caching="--no-enable-prefix-caching" not in options,
        max_num_batched_tokens=min(4096, int(options["--max-num-batched-tokens"][0])),
        args=(*kept, *more.args, "--additional-config", json.dumps(additional)),
        env=more.env,
        connector_extra=(*PATIENT, *ours.items()),
        who_computes=None,
    )


SHAPES = {
    "deepseek-r1": Shape(MLA, prefill_tp=2),
    "deepseek-v3.1": Shape(MLA, decode_dp=2),
    "glm-4.7": Shape(TINY, prefill_tp=2),
    "kimi-k2.5": Shape(MLA),
    "kimi-k2.6": Shape(MLA, prefill_tp=2),
    "minimax-m2": Shape(TINY),
    "qwen3-moe": Shape(TINY, prefill_tp=2),
    "qwen3-vl": Shape(VISION, decode_dp=2, args=ONE_IMAGE, env=UNPINNED),
    "large-scale-ep": Shape(MLA, prefill_tp=2),
}
SHORT = "kimi-k2.5"


def pair(name: str) -> ClusterConfig:
    prefill, decode = (recipes()[number - 1] for number in STARTED[name])
    assert (prefill.side, decode.side) == ("prefill", "decode")
    shape = SHAPES[name]
    engines = (
        engine(prefill, Role.PREFILL, shape.prefill_tp, 1, shape),
        engine(decode, Role.DECODE, 1, shape.decode_dp, shape),
    )
    cluster = cluster_of(f"recipe-{name}", engines[:1], engines[1:], shape.model)
    return dataclasses.replace(cluster, single=on_npu(EngineConfig(args=shape.args, env=shape.env)))


PAIRS = [pair(name) if name == SHORT else long(pair(name)) for name in STARTED]

pytestmark = [pytest.mark.npu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("cluster", PAIRS, ids=str, indirect=True)
def test_answers(client: Client, reference) -> None:
    """Short prompts, those of several steps, and several at a time."""
    prompts = [random_prompt(tokens, "recipe") for tokens in (1, 128, 300, 1000, 2500)]
    assert_agree(reference, prompts, [client.complete(prompt) for prompt in prompts])
    others = [random_prompt(tokens, f"recipe-{tokens}") for tokens in (5, 129, 384, 700)]
    assert_agree(reference, others, at_once(client.complete, others, concurrency=4))
