# SPDX-License-Identifier: Apache-2.0
"""Pairs of vllm-ascend's guides, as `vllm-ascend-pd migrate` changes them, started on vllm-ascend.

The emulated NPU has no quantized weights, routed experts, captured graphs or MTP. So the pairs run a model of the same
attention with dense layers, without the options for these, and with parallel sizes divided. The variables stay.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from harness.agreement import LISTED, assert_agree, compare
from harness.ascend import NO_NZ, WITH_IMAGES
from harness.client import Client, Completion, at_once, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.engines import PATIENT, EngineConfig, Role
from harness.models import MLA, TINY, ModelSpec
from harness.pool import Reference, long
from harness.recipes import STARTED, Recipe, recipes
from harness.vision import ONE_IMAGE, VISION, chat_about, data_url, png
from npu_engines import cluster_of, on_npu

# Options of recipes that are for what the emulated NPU does not have, or that the harness gives itself.
_NOT_HERE = {
    "--quantization": "quantized weights",
    "--speculative-config": "MTP",
    "--compilation-config": "captured graphs",
    "--gpu-memory-utilization": "memory",
    "--kv-transfer-config": "the harness",
    "--tensor-parallel-size": "divided",
    "--data-parallel-size": "divided",
    "--data-parallel-rank": "divided",
    "--data-parallel-size-local": "divided",
    "--mm-encoder-tp-mode": "the model",
    "--max-model-len": "the model",
    "--no-enable-prefix-caching": "the harness",
    "--max-num-batched-tokens": "the harness",
    "--enforce-eager": "the harness",
}
_EXPERT_PARALLEL = "--enable-expert-parallel"
"""vLLM refuses it for a model whose configuration names no experts."""
_EXPERTS = ("finegrained_tp_config", "enable_shared_expert_dp")
"""Keys of --additional-config that are for routed experts, or for data-parallel engines that share them."""
_SEQUENCE_PARALLEL = ("VLLM_ASCEND_ENABLE_FLASHCOMM1", "enable_flashcomm1")
"""A variable and a key of --additional-config. vllm-ascend refuses them for an engine of TP 1. For models whose
configuration names no experts, they need an operator that is compiled with CANN (`aclnnMatmulReduceScatterV2`)."""
_COMPUTED_BY_PREFILL = 1000
"""Tokens of a prompt. Decode engines that decide who computes may compute shorter ones themselves."""


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
    names_experts = more.model is MLA
    left_out = _EXPERTS if names_experts and tp > 1 else (*_EXPERTS, *_SEQUENCE_PARALLEL)
    given = json.loads(options.pop("--additional-config", ["{}"])[0])
    additional = json.loads(NO_NZ) | {name: value for name, value in given.items() if name not in left_out}
    env = [(name, value) for name, value in recipe.arguments().environment.items() if value and name not in left_out]
    if dp > 1:  # vLLM starts one for each engine otherwise
        options["--api-server-count"] = ["1"]
    not_here = _NOT_HERE.keys() | (set() if names_experts else {_EXPERT_PARALLEL})
    kept = [word for name, words in options.items() if name not in not_here for word in (name, *words)]
    ours = recipe.migrated.kv_transfer_config.get("kv_connector_extra_config", {})
    return EngineConfig(
        role,
        tp=tp,
        dp=dp,
        prefix_caching="--no-enable-prefix-caching" not in options,
        max_num_batched_tokens=min(4096, int(options["--max-num-batched-tokens"][0])),
        args=(*kept, *more.args, "--additional-config", json.dumps(additional)),
        env=(*env, *more.env),
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
    "qwen3-vl": Shape(VISION, decode_dp=2, args=ONE_IMAGE, env=WITH_IMAGES),
    "large-scale-ep": Shape(MLA, prefill_tp=2),
}
SHORT = "deepseek-r1"
RECIPES = recipes()


def pair(name: str) -> ClusterConfig:
    prefill, decode = (RECIPES[number - 1] for number in STARTED[name])
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
def test_answers(cluster: Cluster, client: Client, reference: Reference) -> None:
    """Short prompts, one of several steps, and several at a time. A model with a vision tower sees an image, too."""
    prompts = [random_prompt(tokens, "recipe") for tokens in (1, 128, 1000)]
    answers = [client.complete(prompt) for prompt in prompts]
    assert_agree(reference, prompts, answers)
    long_ones = [each for prompt, each in zip(prompts, answers, strict=True) if len(prompt) >= _COMPUTED_BY_PREFILL]
    assert_received(long_ones)
    others = [random_prompt(tokens, f"recipe-{tokens}") for tokens in (5, 129, 300)]
    assert_agree(reference, others, at_once(client.complete, others, concurrency=3))
    if cluster.config.model.vision:
        with Client(reference.engine.url, logprobs=LISTED) as single:
            chats = [chat_about("What is this? " * 100, data_url(png(name))) for name in ("recipe", "another")]
            about, other = (client.chat(messages) for messages in chats)
            assert_received([about, other])
            assert about.token_ids != other.token_ids
            assert compare(about, single.chat(chats[0]))[1] is None


def assert_received(answers: Sequence[Completion]) -> None:
    """Checks that decode has KV from prefill for each answer."""
    assert all(answer.kv_transfer_params and answer.kv_transfer_params["received_bytes"] > 0 for answer in answers)
