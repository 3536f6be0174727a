# SPDX-License-Identifier: Apache-2.0
"""What a config.json leaves to the model's code is as transformers reads it, or refused."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ascend_pd.tools.plan.defaults import filled
from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.model import _LAYER_KINDS, Cached, PlanError, parse_model

SIZES = {"hidden_size": 640, "num_attention_heads": 20, "num_hidden_layers": 12, "dtype": "bfloat16"}
LISTED = {"layer_types": ["full_attention"] * 12}
GIVEN = {**SIZES, "head_dim": 64, "num_key_value_heads": 4}
WINDOW = {"sliding_window": 512}
PART_ON = {**WINDOW, "use_sliding_window": True, "max_window_layers": 5}
LETTERS = {Cached.FULL: "F", Cached.WINDOW: "W", Cached.STATE: "S", Cached.NOTHING: "N"}


BFLOAT16 = {"torch_dtype": "bfloat16"}
GEMMA_3_27B = {
    "head_dim": 128,
    "hidden_size": 5376,
    "model_type": "gemma3_text",
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
}
GEMMA_3_4B = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
LLAMA_4_SCOUT = {
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    **BFLOAT16,
}
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "head_dim": 72,
    "hidden_size": 2304,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "model_type": "kimi_linear",
    "num_attention_heads": 32,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    **BFLOAT16,
}
LONGCAT_FLASH = {
    "architectures": ["LongcatFlashForCausalLM"],
    "attention_method": "MLA",
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "num_attention_heads": 64,
    "num_layers": 28,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    **BFLOAT16,
}
PUBLISHED = {
    "gemma-3-27b-it": ({"model_type": "gemma3", "text_config": GEMMA_3_27B, **BFLOAT16}, 16, (128, 128), "WWWWWF"),
    "gemma-3-4b-it": ({"model_type": "gemma3", "text_config": GEMMA_3_4B, **BFLOAT16}, 4, (256, 256), "WWWWWF"),
    "Llama-4-Scout": ({"model_type": "llama4", "text_config": LLAMA_4_SCOUT, **BFLOAT16}, 8, (128, 128), "WWWF"),
    "MiniMax-M2": (MINIMAX_M2, 8, (128, 128), "F"),
    "Kimi-Linear-48B-A3B": (KIMI_LINEAR, 1, (512, 64), "SSSFSSSFSSSFSSSFSSSFSSSFSSF"),
    "LongCat-Flash-Chat": (LONGCAT_FLASH, 1, (512, 64), "F"),
}
"""The fields of published files that say what is cached: the file, KV heads, widths, and kinds of layers in turn."""


@pytest.fixture(params=["transformers", "alone"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether transformers can be imported."""
    if request.param == "alone":
        monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    return str(request.param)


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_files_are_described(model: str, installed: str) -> None:
    config, kv_heads, widths, kinds = PUBLISHED[model]
    shape = parse_model(config)
    assert (shape.kv_heads, shape.widths) == (kv_heads, widths)
    cached = "".join(LETTERS[kind] for kind in shape.cached)
    layers = {"LongCat-Flash-Chat": 56}.get(model) or (config.get("text_config") or config)["num_hidden_layers"]
    assert cached == (kinds * 62)[:layers]


@pytest.mark.parametrize("model_type", ["gemma3_text", "llama4_text"])
def test_what_families_fill_in_is_what_transformers_fills_in(model_type: str) -> None:
    theirs = dict(decoders())[model_type](num_hidden_layers=12)
    ours = filled({"num_hidden_layers": 12}, model_type)
    for field in ("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window"):
        assert ours.get(field) == getattr(theirs, field, None), field
    said = {"hidden_size": 640, "num_hidden_layers": 12, "dtype": "bfloat16"}
    kinds = parse_model({"model_type": model_type, **said}).cached
    assert [kind is Cached.FULL for kind in kinds] == [kind == "full_attention" for kind in theirs.layer_types]


def test_transformers_fills_in_what_else_is_missing() -> None:
    model = parse_model({"model_type": "qwen3", **SIZES})
    assert (model.kv_heads, model.widths) == (32, (128, 128))


def test_minimax_with_linear_layers() -> None:
    shape = parse_model({**MINIMAX_M2, "attn_type_list": [0, 1] * 31})
    assert "".join(LETTERS[kind] for kind in shape.cached) == "SF" * 31


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({**MINIMAX_M2, "attn_type_list": [1, 2] * 31}, "attn_type_list is .*, not a list of 0 and 1"),
        ({**MINIMAX_M2, "attn_type_list": [1]}, "lists 1 kinds of layers for 62"),
        ({**KIMI_LINEAR, "linear_attn_config": {"full_attn_layers": 4}}, "no list full_attn_layers"),
        ({**LONGCAT_FLASH, "num_layers": "x"}, "num_layers is 'x'"),
    ],
)
def test_published_fields_with_other_values_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        parse_model(fields)


SPARSE = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "num_attention_heads": 64,
    "num_hidden_layers": 10,
    "model_type": "glm_moe_dsa",
    **BFLOAT16,
}


@pytest.mark.parametrize(
    ("fields", "without"),
    [
        ({}, []),
        ({"index_topk_freq": 4}, [2, 3, 4, 6, 7, 8]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [3, 4, 5, 7, 8, 9]),
        ({"index_topk_pattern": "FSSFSSFSSF"}, [1, 2, 4, 5, 7, 8]),
        ({"indexer_types": ["full", "shared"] * 5}, [1, 3, 5, 7, 9]),
        ({"index_topk_freq": 4, "indexer_types": ["full"] * 10}, []),
    ],
)
def test_an_indexers_key_is_counted_only_where_there_is_one(fields: dict[str, Any], without: list[int]) -> None:
    model = parse_model({**SPARSE, **fields})
    assert sorted(model.without_key) == without
    engines = PlannedEngine("prefill", 2, 2, 1, 128), PlannedEngine("decode", 1, 1, 1, 128)
    plan = make_plan(model, Layout.VLLM_ASCEND, *engines, step_tokens=128, staging_slots=2, tokens=128)
    assert plan.model.bytes_per_token == (10 * (512 + 64) + (10 - len(without)) * 128) * 2
    assert plan.prompt.nbytes == 128 * plan.model.bytes_per_token
    assert sum(plan.prefill.bytes_per_token) == plan.model.bytes_per_token
    assert len(plan.senders[0].pieces) == 3, "a layer with a key stands for all"


@pytest.mark.parametrize(
    "fields", [{"index_topk_freq": 0}, {"index_topk_pattern": 7}, {"index_topk_freq": 2, "index_skip_topk_offset": "x"}]
)
def test_where_keys_are_is_not_guessed(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"config.json: {list(fields)[-1]} is"):
        parse_model({**SPARSE, **fields})


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"model_type": "qwen3", **SIZES, "num_key_value_heads": 4}, "head_dim"),
        ({"model_type": "qwen3", **SIZES, "num_key_value_heads": 4, "head_dim": None}, "head_dim"),
        ({"model_type": "qwen3", **SIZES, "head_dim": 64}, "num_key_value_heads"),
        ({"model_type": "gemma2", **GIVEN, **WINDOW}, "layer_types"),
        ({"model_type": "qwen2", **GIVEN, **PART_ON}, "layer_types"),
        ({"model_type": "of-its-own", **GIVEN, **PART_ON}, "layer_types"),
        ({"model_type": "mistral", **GIVEN}, "sliding_window"),
        ({"model_type": "gemma3n_text", **GIVEN, **LISTED}, "num_kv_shared_layers"),
    ],
)
def test_what_only_the_code_knows_is_asked_for(
    fields: dict[str, Any], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where transformers is missing, or does not know the model."""
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    with pytest.raises(PlanError, match=rf"does not say {missing} .*: add it to a copy of the file"):
        parse_model(fields)


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"model_type": "cohere2", **WINDOW, "sliding_window_pattern": 4}, "WWWFWWWFWWWF"),
        ({"model_type": "gemma3_text", **WINDOW, "sliding_window_pattern": 6}, "WWWWWFWWWWWF"),
        ({"model_type": "qwen2", **WINDOW}, "FFFFFFFFFFFF"),
        ({"model_type": "qwen2", **PART_ON, "use_sliding_window": False}, "FFFFFFFFFFFF"),
        ({"model_type": "mistral", **WINDOW}, "WWWWWWWWWWWW"),
        ({"model_type": "mistral", "sliding_window": None}, "FFFFFFFFFFFF"),
    ],
)
def test_what_the_file_says_is_not_asked_for(fields: dict[str, Any], kinds: str) -> None:
    assert "".join(LETTERS[kind] for kind in parse_model({**GIVEN, **fields}).cached) == kinds


def decoders() -> Iterator[tuple[str, type]]:
    """Each with the type of its configuration's text part, if transformers can say it without optional packages."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    for model_type in {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}:
        try:
            config = mapping[model_type]
        except (ImportError, KeyError):
            continue
        text = (getattr(config, "sub_configs", None) or {}).get("text_config", config)
        yield getattr(text, "model_type", model_type) or model_type, text


_ALIKE = {True: Cached.WINDOW, False: Cached.FULL}


def differences(model_type: str, config: type, fields: dict[str, Any]) -> list[str]:
    """Between our figures and transformers', where both have some."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = config(**fields)
        theirs = {name: getattr(read, name, None) for name in ("hidden_size", "head_dim", "num_key_value_heads")}
        kinds, window = getattr(read, "layer_types", None), getattr(read, "sliding_window", None)
    except Exception:  # noqa: BLE001 - not with these fields, whatever its checks raise
        return []
    if theirs["hidden_size"] != SIZES["hidden_size"] or read.is_encoder_decoder or hasattr(read, "kv_lora_rank"):
        return []
    if theirs["head_dim"] != fields.get("head_dim", theirs["head_dim"]):  # what is given does not count there
        return []
    try:
        ours = parse_model({"model_type": model_type, **fields})
    except PlanError:
        return []
    found = []
    if theirs["head_dim"] not in (None, 0, ours.widths[0]):
        found.append(f"head_dim {theirs['head_dim']}, ours {ours.widths[0]}")
    if theirs["num_key_value_heads"] not in (None, ours.kv_heads):
        found.append(f"num_key_value_heads {theirs['num_key_value_heads']}, ours {ours.kv_heads}")
    theirs_cached = [_LAYER_KINDS[kind] for kind in kinds] if kinds else [_ALIKE[bool(window)]] * len(ours.cached)
    if [*ours.cached] != theirs_cached:
        found.append(f"layer_types {kinds}, window {window}, ours {ours.cached}")
    return [f"{model_type}, {fields}: {one}" for one in found]


def test_no_figure_is_other_than_that_of_transformers() -> None:
    known = dict(decoders())
    assert {"llama", "qwen3", "gemma3_text"} <= known.keys()
    asked = [{**SIZES, "num_key_value_heads": 4}, {**SIZES, "head_dim": 64}]
    asked += [GIVEN, {**GIVEN, **WINDOW}, {**GIVEN, **PART_ON}]
    found = [one for name, config in known.items() for fields in asked for one in differences(name, config, fields)]
    assert found == []
