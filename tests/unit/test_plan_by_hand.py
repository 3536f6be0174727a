# SPDX-License-Identifier: Apache-2.0
"""A plan's bytes for published models, against values that were worked out by hand from their config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from planned import DATA, DEEPSEEK, LLAMA, QWEN

from vllm_ascend_pd.tools.plan.engine import PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import PlanFigures, make_plan
from vllm_ascend_pd.tools.plan.model import PlanError, parse_model

BFLOAT16 = {"dtype": "bfloat16"}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, **BFLOAT16}
PUBLISHED_DEEPSEEK = json.loads(DEEPSEEK.read_text())
GATED_DELTA = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
}


def dense(model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    """The fields of config.json that say what is cached."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {
        "model_type": model_type,
        **sizes,
        "head_dim": head_dim,
        "hidden_size": heads * head_dim,
        **BFLOAT16,
        **more,
    }


@dataclass(frozen=True)
class Model:
    """A model's file, and the bytes that its layers keep, in bfloat16 unless the file says otherwise."""

    name: str
    config: Mapping[str, Any]
    full: float  # of a token, in layers that keep all tokens
    windowed: int = 0  # of a token, in layers with a window or chunks
    # Of prompts of 1,000 and 32,000 tokens: tokens in the blocks of 128 tokens that windows and chunks reach into.
    seen: tuple[int, int] = (0, 0)
    held: tuple[int, int] = (0, 0)  # tokens in the blocks that decode has for them at most
    states: int = 0  # of all states
    windows: int = 0  # of whole windows and chunks


KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 32,
    "num_hidden_layers": 27,
    **MLA,
}
MODELS = (
    Model("Qwen3-8B", dense("qwen3", 36, 32, 8, 128), 36 * 8 * 256 * 2),
    Model("Qwen3-32B", dense("qwen3", 64, 64, 8, 128), 262_144),
    Model("Llama-3.3-70B", json.loads(LLAMA.read_text()), 327_680),
    Model("Qwen3-235B", json.loads(QWEN.read_text()), 94 * 2_048),
    Model(
        "Qwen3-Next-80B",
        dense("qwen3_next", 48, 16, 2, 256, linear_num_value_heads=32, **GATED_DELTA),
        full=12 * 2_048,
        states=36 * (3 * 8_192 * 2 + 32 * 128 * 128 * 2),
    ),
    Model(
        "Qwen3.5-27B",
        {
            "model_type": "qwen3_5",
            "text_config": dense(
                "qwen3_5_text", 64, 24, 4, 256, linear_num_value_heads=48, mamba_ssm_dtype="float32", **GATED_DELTA
            ),
        },
        full=16 * 4_096,
        states=48 * (3 * 10_240 * 2 + 48 * 128 * 128 * 4),
    ),
    Model("DeepSeek-V3", PUBLISHED_DEEPSEEK, 61 * 576 * 2),
    Model("DeepSeek-R1", PUBLISHED_DEEPSEEK, 61 * 576 * 2),
    Model("Kimi-K2", {"model_type": "kimi_k2", "num_attention_heads": 64, "num_hidden_layers": 61, **MLA}, 70_272),
    Model(
        "DeepSeek-V3.2",
        {**PUBLISHED_DEEPSEEK, "model_type": "deepseek_v32", "index_head_dim": 128},
        61 * 704 * 2,
    ),
    Model("GLM-4.6", dense("glm4_moe", 92, 96, 8, 128), 92 * 4_096),
    Model(
        "GLM-5",
        {"model_type": "glm_moe_dsa", "num_attention_heads": 64, "num_hidden_layers": 78, "index_head_dim": 128, **MLA},
        78 * 704 * 2,
    ),
    Model(
        "Kimi-Linear-48B",
        KIMI_LINEAR,
        full=7 * 1_152,
        states=20 * (3 * 3 * 4_096 * 2 + 32 * 128 * 128 * 4),
    ),
    Model("MiniMax-M2", dense("minimax_m2", 62, 48, 8, 128, attn_type_list=[1] * 62), 62 * 4_096),
    Model(
        "gpt-oss-120b",
        dense("gpt_oss", 36, 64, 8, 64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18),
        full=73_728 // 2,
        windowed=73_728 // 2,
        seen=(256, 128),  # 872 to 999, and 31,872 to 31,999
        held=(256, 256),
        windows=18 * 128 * 2_048,
    ),
    Model(
        "Llama-4-Scout",
        {
            "model_type": "llama4",
            "text_config": dense("llama4_text", 48, 40, 8, 128, attention_chunk_size=8_192, no_rope_layers=[]),
        },
        full=196_608 // 4,
        windowed=196_608 // 4 * 3,
        seen=(1_024, 7_424),  # from 24,576 on
        held=(1_024, 8_192),
        windows=36 * 8_192 * 4_096,
    ),
    Model(
        "Gemma-3-27B",
        {
            "model_type": "gemma3",
            "text_config": dense("gemma3_text", 62, 32, 16, 128, sliding_window=1_024, sliding_window_pattern=6),
        },
        full=10 * 8_192,
        windowed=52 * 8_192,
        seen=(1_024, 1_024),  # from 30,976 on, which begins a block
        held=(1_024, 1_152),
        windows=52 * 1_024 * 8_192,
    ),
    Model(
        "Mistral-Small-3.2",
        {"model_type": "mistral3", "text_config": dense("mistral", 40, 32, 8, 128, sliding_window=None)},
        163_840,
    ),
    Model("Hunyuan-A13B", dense("hunyuan_v1_moe", 32, 32, 8, 128, use_cla=False, cla_share_factor=2), 131_072),
    Model("ERNIE-4.5-300B", dense("ernie4_5_moe", 54, 64, 8, 128), 221_184),
    Model(
        "Hunyuan-Large",
        {
            **dense("hunyuan", 64, 80, 8, 128, hidden_size=6_400, use_cla=True, cla_share_factor=2),
            "head_dim": None,
            "attention_head_dim": 128,
        },
        262_144 // 2,
    ),
)


def planned(config: Mapping[str, Any], tokens: int) -> PlanFigures:
    """Between engines of one rank, with blocks of 128 tokens."""
    engines = (PlannedEngine(side, 1, 1, 1, 128) for side in ("prefill", "decode"))
    return make_plan(parse_model(config), *engines, step_tokens=8192, staging_slots=4, tokens=tokens)


@pytest.mark.parametrize(("prompt", "tokens"), [(0, 1_000), (1, 32_000)])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_bytes_of_a_prompt(model: Model, prompt: int, tokens: int) -> None:
    plan = planned(model.config, tokens)
    whole = -(-tokens // 128) * 128
    assert (plan.bytes_per_token, plan.window_bytes, plan.state_bytes) == (model.full, model.windows, model.states)
    assert plan.prompt.nbytes == model.full * whole + model.windowed * model.seen[prompt] + model.states
    assert plan.prompt.room == model.full * whole + model.windowed * model.held[prompt] + model.states


def test_what_was_off_without_windows_and_states() -> None:
    by_name = {model.name: model for model in MODELS}
    mib = {name: planned(by_name[name].config, 1_000).prompt.nbytes / 2**20 for name in by_name}
    assert mib["gpt-oss-120b"] == 45
    assert mib["Qwen3-Next-80B"] == pytest.approx(24 + 37.7, abs=0.1)
    assert mib["Qwen3.5-27B"] == pytest.approx(64 + 146.8, abs=0.1)


@pytest.mark.parametrize(
    ("name", "per_token", "windows_mib"),
    [
        ("flash", 21 * (256 + 32.5) + 20 * 8, 17.02),
        ("pro", 30 * 288.5 + 31 * 8, None),
    ],
)
def test_deepseek_v4(name: str, per_token: float, windows_mib: float | None) -> None:
    """What is sent of a prompt is in `test_plan_model.py`."""
    plan = planned(json.loads((DATA / f"deepseek-v4-{name}.json").read_text()), 1_000)
    assert plan.bytes_per_token == per_token
    assert windows_mib in (None, round(plan.window_bytes / 2**20, 2))


MIMO_V2_FLASH = dense(
    "mimo_v2_flash", 48, 64, 4, 192, v_head_dim=128, swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128
)
STEP_3 = {
    "model_type": "step3_vl",
    "text_config": {
        "model_type": "step3_text",
        "head_dim": 256,
        "hidden_size": 7_168,
        "num_attention_groups": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 61,
        **BFLOAT16,
    },
}
STEP_3_5_FLASH = {
    "model_type": "step3p5",
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
    "head_dim": 128,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 12,
    "num_attention_groups": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "sliding_window": 512,
    **BFLOAT16,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MIMO_V2_FLASH, "config.json has swa_num_key_value_heads, layers that differ in their KV heads: this command"),
        (STEP_3_5_FLASH, "config.json has attention_other_setting, layers that differ in their KV heads: this command"),
        (
            STEP_3,
            r"config.json does not say layer_types, .* \(it does not know step3_text; it does not know step3_vl\): add "
            "the field to a copy of the file; vLLM may have a configuration of its own for this model, which has it$",
        ),
    ],
    ids=["MiMo-V2-Flash", "Step-3.5-Flash", "Step-3"],
)
def test_models_that_are_refused(config: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=f"^{reason}"):
        parse_model(config)


def test_step_3_with_the_fields_that_the_reason_asks_for() -> None:
    """One after the other, as the command asks for them."""
    text = {**STEP_3["text_config"], "layer_types": ["full_attention"] * 61}
    with pytest.raises(PlanError, match="does not say num_key_value_heads"):
        parse_model({**STEP_3, "text_config": text})
    plan = planned({**STEP_3, "text_config": {**text, "num_key_value_heads": 1}}, 1_000)
    assert plan.bytes_per_token == 61 * 2 * 256 * 2
