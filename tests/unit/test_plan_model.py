# SPDX-License-Identifier: Apache-2.0
"""What is read from a model's config.json: as vLLM and transformers read it, or refused. DeepSeek V4's caches, which
have one entry for several tokens."""

import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planned import DATA, DEEPSEEK, assert_conserved, plan_for

from vllm_ascend_pd.tools.plan.engine import PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import PlanFigures, make_plan
from vllm_ascend_pd.tools.plan.layers import LayerCache, ModelShape
from vllm_ascend_pd.tools.plan.model import (
    _LAYER_KINDS,
    Cached,
    CacheDtype,
    PlanError,
    parse_model,
    read_model,
)
from vllm_ascend_pd.tools.plan.tables import render

BFLOAT16 = {"torch_dtype": "bfloat16"}
TINY = {
    "architectures": ["TinyForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    **BFLOAT16,
}
SIZES = {"hidden_size": 640, "num_attention_heads": 20, "num_hidden_layers": 12, "dtype": "bfloat16"}
LISTED = {"layer_types": ["full_attention"] * 12}
GIVEN = {**SIZES, "head_dim": 64, "num_key_value_heads": 4}
WINDOW = {"sliding_window": 512}
OF_ITS_OWN = {"model_type": "of-its-own", **GIVEN, **LISTED}
"""A model that transformers does not know."""
PART_ON = {**WINDOW, "use_sliding_window": True, "max_window_layers": 5}
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
    "gemma-3-4b-it": ({"model_type": "gemma3", "text_config": GEMMA_3_4B, **BFLOAT16}, 4, (256, 256), "WWWWWF"),
    "Llama-4-Scout": ({"model_type": "llama4", "text_config": LLAMA_4_SCOUT, **BFLOAT16}, 8, (128, 128), "CCCF"),
    "MiniMax-M2": (MINIMAX_M2, 8, (128, 128), "F"),
    "Kimi-Linear-48B-A3B": (KIMI_LINEAR, 1, (512, 64), "SSSFSSSFSSSFSSSFSSSFSSSFSSF"),
    "LongCat-Flash-Chat": (LONGCAT_FLASH, 1, (512, 64), "F"),
}
"""The fields of published files that say what is cached: the file, KV heads, widths, and kinds of layers in turn."""
SPARSE = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "num_attention_heads": 64,
    "num_hidden_layers": 10,
    "model_type": "glm_moe_dsa",
    **BFLOAT16,
}
FLASH = DATA / "deepseek-v4-flash.json"
PRO = DATA / "deepseek-v4-pro.json"
CONFIG: dict[str, Any] = json.loads(FLASH.read_text())


def kind(caches: tuple[LayerCache, ...]) -> Cached:
    if not caches:
        return Cached.NOTHING
    [cache] = caches
    if cache.is_state:
        return Cached.STATE
    return Cached.WINDOW if cache.window else Cached.CHUNK if cache.chunk else Cached.FULL


def cached(shape: ModelShape) -> str:
    """A letter for each layer."""
    return "".join(kind(caches).name[0] for caches in shape.layers)


def kv(shape: ModelShape) -> tuple[int, tuple[int, ...]]:
    """The KV heads and the elements of a head, by tensor, of layers with attention."""
    [tensors] = {cache.tensors for cache in shape.kinds if not cache.is_state}
    return tensors[0].heads, tuple(tensor.width for tensor in tensors)


def planned(model: ModelShape, p_tp: int = 1, p_pp: int = 1, block_size: int = 128, tokens: int = 1000) -> PlanFigures:
    """To a decode engine of one rank."""
    engines = PlannedEngine("prefill", p_tp, p_pp, 1, block_size), PlannedEngine("decode", 1, 1, 1, block_size)
    return make_plan(model, *engines, step_tokens=128, staging_slots=2, tokens=tokens)


def test_heads_without_groups_and_head_size_of_its_own():
    model = parse_model({**TINY, "num_key_value_heads": None, "head_dim": 32})
    assert kv(model) == (4, (32, 32))


@pytest.mark.parametrize("part", ["text_config", "llm_config"])
def test_text_part_of_a_larger_model(part):
    outer = {"architectures": ["LookForCausalLM"], "torch_dtype": "float16", "num_hidden_layers": 99}
    inner = {name: value for name, value in TINY.items() if name not in ("architectures", "torch_dtype")}
    model = parse_model({**outer, part: inner, "vision_config": {"num_hidden_layers": 7}})
    assert (model.name, len(model.layers), model.kinds[0].tensors[0].dtype) == ("LookForCausalLM", 4, "float16")


NO_TRANSFORMERS = ("transformers.models.auto.configuration_auto", None)
"""An entry of sys.modules with which it cannot be imported."""
SAY_ALL = ("MiniMax-M2", "Kimi-Linear-48B-A3B")
"""The published files that leave nothing to the model's code."""


@pytest.mark.parametrize("transformers", [True, False], ids=["transformers", "alone"])
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_files_are_described(model: str, transformers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, kv_heads, widths, kinds = PUBLISHED[model]
    if not transformers:
        monkeypatch.setitem(sys.modules, *NO_TRANSFORMERS)
        if model not in SAY_ALL:
            with pytest.raises(PlanError, match=r"does not say .*: install the transformers that comes with vLLM"):
                parse_model(config)
            return
    shape = parse_model(config)
    assert kv(shape) == (kv_heads, widths)
    layers = {"LongCat-Flash-Chat": 56}.get(model) or (config.get("text_config") or config)["num_hidden_layers"]
    assert cached(shape) == (kinds * 62)[:layers]


@pytest.mark.parametrize("part", ["", "text_config"])
@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v32"])
def test_models_are_read_as_those_whose_code_vllm_runs_for_them(
    model_type: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions of transformers know them, and some do not."""
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    monkeypatch.delitem(mapping._mapping, model_type, raising=False)
    config = {**json.loads(DEEPSEEK.read_text()), "model_type": model_type}
    assert kv(parse_model({"model_type": "kimi_k25", part: config} if part else config)) == (1, (512, 64))


def test_transformers_fills_in_what_else_is_missing() -> None:
    model = parse_model({"model_type": "qwen3", **SIZES})
    assert kv(model) == (32, (128, 128))


@pytest.mark.parametrize(
    ("base", "fields", "kinds"),
    [
        (TINY, {}, "FFFF"),
        (TINY, {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], **WINDOW}, "WWWF"),
        (TINY, {"layer_types": ["linear_attention", "full_attention"] * 2}, "SFSF"),
        (TINY, {"layers_block_type": ["mamba", "attention", "moe", "attention"], "mamba_d_conv": 4}, "SFNF"),
        (TINY, {"num_kv_shared_layers": 3}, "FNNN"),
        (TINY, {"use_cla": True, "cla_share_factor": 2}, "FNFN"),
        (MINIMAX_M2, {"attn_type_list": [0, 1] * 31}, "SF" * 31),
        (GIVEN, {"model_type": "qwen3_next", "full_attention_interval": 4}, "SSSFSSSFSSSF"),
        (GIVEN, {"model_type": "cohere2", **WINDOW, "sliding_window_pattern": 4}, "WWWFWWWFWWWF"),
        (GIVEN, {"model_type": "gemma3_text", **WINDOW, "sliding_window_pattern": 6}, "WWWWWFWWWWWF"),
        (GIVEN, {"model_type": "qwen2", **WINDOW}, "FFFFFFFFFFFF"),
        (GIVEN, {"model_type": "qwen2", **PART_ON, "use_sliding_window": False}, "FFFFFFFFFFFF"),
        (GIVEN, {"model_type": "qwen2", **PART_ON}, "FFFFFWWWWWWW"),
        (GIVEN, {"model_type": "mistral", **WINDOW}, "WWWWWWWWWWWW"),
        (GIVEN, {"model_type": "mistral"}, "WWWWWWWWWWWW"),
        (GIVEN, {"model_type": "mistral", "sliding_window": None}, "FFFFFFFFFFFF"),
    ],
)
def test_which_layers_have_a_cache(base: dict[str, Any], fields: dict[str, Any], kinds: str) -> None:
    model = parse_model({**base, **fields})
    assert cached(model) == kinds
    assert model.has_states == ("S" in kinds)


def test_layers_that_read_what_others_wrote_keep_nothing():
    kinds = [*["sliding_attention"] * 4, "full_attention"] * 6
    shared = {"num_hidden_layers": 30, "layer_types": kinds, "sliding_window": 512, "num_kv_shared_layers": 10}
    model = parse_model({**TINY, **shared})
    assert cached(model) == "WWWWF" * 4 + "N" * 10
    with pytest.raises(PlanError, match="no layer of this model has its own attention"):
        parse_model({**TINY, "num_kv_shared_layers": 4})


def test_a_hybrid_model_of_all_kinds() -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention", "sliding_attention", "chunked_attention"]
    sizes = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4}
    sizes |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32"}
    windows = {"sliding_window": 8, "attention_chunk_size": 256}
    model = parse_model({**TINY, "num_hidden_layers": 5, "layer_types": kinds, **sizes, **windows})
    plan = planned(model, 2, 2)
    entry = 2 * (16 + 16) * 2
    assert (plan.bytes_per_token, plan.window_bytes) == (entry, (8 + 256) * entry)
    assert plan.state_bytes == 2 * (3 * (2 * 2 * 8 + 4 * 16) * 2 + 4 * 16 * 8 * 4)
    assert_conserved(plan)


@pytest.mark.parametrize(
    ("fields", "nbytes"),
    [
        ({"mamba_n_groups": 1, "mamba_d_state": 4, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_conv": 4}, 272),
        ({"n_groups": 1, "ssm_state_size": 4, "mamba_num_heads": 2, "mamba_head_dim": 8, "conv_kernel": 4}, 272),
        ({"mamba_d_state": 4, "mamba_n_heads": 2, "mamba_d_head": "auto", "mamba_d_conv": 4}, 0),
        ({}, 0),
    ],
)
def test_states_of_mamba_2(fields: dict[str, Any], nbytes: int) -> None:
    """A convolution's state of 3 rows of 16 + 2 * 4 channels, and 2 heads of 8 * 4."""
    assert nbytes in (0, 2 * (3 * (16 + 2 * 4) + 2 * 8 * 4))
    model = parse_model({**TINY, "head_dim": 16, "layer_types": ["mamba", "attention"] * 2, **fields})
    plan = planned(model)
    assert plan.state_bytes == 2 * nbytes
    assert any("a kind that this command does not know" in note for note in model.notes) == (not nbytes)


@pytest.mark.parametrize(
    ("fields", "chosen", "dtype", "noted"),
    [
        ({}, CacheDtype.AUTO, CacheDtype.BFLOAT16, False),
        ({"torch_dtype": None, "dtype": "float16"}, CacheDtype.AUTO, CacheDtype.FLOAT16, False),
        ({"torch_dtype": "float32"}, CacheDtype.AUTO, CacheDtype.BFLOAT16, True),
        ({"torch_dtype": None}, CacheDtype.AUTO, CacheDtype.BFLOAT16, True),
        ({"torch_dtype": "float32"}, CacheDtype.FP8, CacheDtype.FP8, False),
    ],
)
def test_dtype(fields, chosen, dtype, noted):
    model = parse_model({**TINY, **fields}, chosen)
    assert model.kinds[0].tensors[0].dtype == dtype.torch_name
    assert any("--kv-cache-dtype" in note for note in model.notes) == noted


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp8", 1), ("int8", 1), ("float16", 2), ("float32", 4)])
def test_bytes_of_a_dtype(dtype, itemsize):
    model = parse_model(TINY, CacheDtype(dtype))
    plan = planned(model)
    assert plan.bytes_per_token == 4 * 2 * (16 + 16) * itemsize


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
    assert [n for n, [cache] in enumerate(model.layers) if len(cache.tensors) == 2] == without
    plan = planned(model, 2, 2, tokens=128)
    assert plan.bytes_per_token == (10 * (512 + 64) + (10 - len(without)) * 128) * 2
    assert plan.prompt.nbytes == 128 * plan.bytes_per_token
    assert plan.prompt.room == 128 * plan.bytes_per_token


@pytest.mark.parametrize(
    ("base", "fields", "reason"),
    [
        (TINY, {"num_attention_heads": None}, "does not say num_attention_heads"),
        (TINY, {"num_hidden_layers": "many"}, "num_hidden_layers is 'many', not a positive number"),
        (OF_ITS_OWN, {"num_key_value_heads": [1, 2]}, r"num_key_value_heads is \[1, 2\], not a positive number"),
        (TINY, {"layer_types": 1}, "layer_types is 1, not a list of names"),
        (TINY, {"layer_types": [1, 2, 3, 4]}, r"layer_types is \[1, 2, 3, 4\], not a list of names"),
        (TINY, {"layers_block_type": "full_attention"}, "layers_block_type is 'full_attention', not a list of names"),
        (TINY, {"layer_types": ["sliding_attention"] * 4}, "does not say sliding_window"),
        (TINY, {"layer_types": ["chunked_attention"] * 4}, "does not say attention_chunk_size"),
        (TINY, {"use_cla": True}, "does not say cla_share_factor"),
        (TINY, {"num_kv_shared_layers": "x"}, "num_kv_shared_layers is 'x', not a positive number"),
        (TINY, {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1, not a positive number"),
        (TINY, {"architectures": 1}, "architectures is 1, not a list of names"),
        (TINY, {"architectures": {}}, "architectures is {}, not a list of names"),
        (TINY, {"layer_types": ["full_attention"] * 3}, "lists 3 kinds of layers for 4 layers"),
        (TINY, {"layer_types": ["psychic_attention"] * 4}, "does not know layers of kind psychic_attention"),
        (TINY, {"layer_types": ["mamba"] * 4}, "no layer of this model has its own attention"),
        (TINY, {"mamba_d_conv": 4}, "has mamba_d_conv but no layer_types"),
        (TINY, {"compress_ratios": [4, 128]}, "compress_ratios: only deepseek_v4 is described, not llama"),
        (TINY, {"v_head_dim": 32}, "keys of 16 and values of 32 elements per head"),
        (CONFIG, {"compress_ratios": [4, 128]}, "compress_ratios is not a list with a number for each of 43 layers"),
        (CONFIG, {"compress_ratios": 4}, "compress_ratios is not a list"),
        (CONFIG, {"compress_ratios": [8] * 43}, "compress_ratios has 8, and vllm-ascend takes 0, 4 and 128"),
        (CONFIG, {"compress_ratios": ["4"] * 43}, "compress_ratios has '4'"),
        (CONFIG, {"index_head_dim": None}, "does not say index_head_dim"),
        (CONFIG, {"model_type": "deepseek_v5"}, "only deepseek_v4 is described, not deepseek_v5"),
        (MINIMAX_M2, {"attn_type_list": [1, 2] * 31}, "attn_type_list is .*, not a list of 0 and 1"),
        (MINIMAX_M2, {"attn_type_list": [1]}, "lists 1 kinds of layers for 62"),
        (KIMI_LINEAR, {"linear_attn_config": {"full_attn_layers": 4}}, "no list full_attn_layers"),
        (LONGCAT_FLASH, {"num_layers": "x"}, "num_layers is 'x'"),
        (LONGCAT_FLASH, {"num_layers": 300_000_000}, "num_layers is 300000000, and 10000 at most"),
        (TINY, {"num_hidden_layers": 300_000_000}, "num_hidden_layers is 300000000, and 10000 at most"),
        (SPARSE, {"index_topk_freq": 0}, "index_topk_freq is 0"),
        (SPARSE, {**OF_ITS_OWN, "index_topk_pattern": 7}, "index_topk_pattern is 7"),
        (SPARSE, {**OF_ITS_OWN, "index_topk_freq": 2, "index_skip_topk_offset": "x"}, "index_skip_topk_offset is 'x'"),
    ],
)
def test_what_is_not_described(base: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        parse_model({**base, **fields})


@pytest.mark.parametrize(
    ("config", "reason"),
    [(DEEPSEEK, "with MLA, a KV cache of fp8 has another memory"), (FLASH, "a KV cache of fp8 has another layout")],
)
def test_latents_of_bytes_are_not_described(config: Path, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        read_model(config, CacheDtype.FP8)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_files_that_are_no_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError, match=r"config.json (is not JSON|is not a JSON object)"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({**GIVEN, **LISTED, "head_dim": None}, "head_dim"),
        ({**GIVEN, **LISTED, "num_key_value_heads": None}, "num_key_value_heads"),
        ({**GIVEN, **WINDOW}, "layer_types"),
        (GIVEN, "layer_types"),
    ],
)
def test_a_field_that_nobody_says_is_asked_for(
    fields: dict[str, Any], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "of-its-own", **fields}
    with pytest.raises(PlanError, match=rf"does not say {missing}, .*\(it does not know of-its-own\): add the field"):
        parse_model(config)
    monkeypatch.setitem(sys.modules, *NO_TRANSFORMERS)
    with pytest.raises(PlanError, match=rf"does not say {missing}, .*\(ModuleNotFoundError: .*or add the field"):
        parse_model(config)


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


def differences(model_type: str, config: type, fields: dict[str, Any]) -> list[str]:
    """Between our figures and transformers', where both have some."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = config(**fields)
        theirs = {name: getattr(read, name, None) for name in ("hidden_size", "head_dim", "num_key_value_heads")}
        kinds, window = getattr(read, "layer_types", None), getattr(read, "sliding_window", None)
        kinds = kinds or getattr(read, "layers_block_type", None)
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
    heads, widths = kv(ours)
    if theirs["head_dim"] not in (None, 0, widths[0]):
        found.append(f"head_dim {theirs['head_dim']}, ours {widths[0]}")
    if theirs["num_key_value_heads"] not in (None, heads):
        found.append(f"num_key_value_heads {theirs['num_key_value_heads']}, ours {heads}")
    ours_cached = [*map(kind, ours.layers)]
    all_alike = [Cached.WINDOW if window else Cached.FULL] * len(ours_cached)
    if ours_cached != ([_LAYER_KINDS[name] for name in kinds] if kinds else all_alike):
        found.append(f"layer_types {kinds}, window {window}, ours {ours_cached}")
    return [f"{model_type}, {fields}: {one}" for one in found]


def test_no_figure_is_other_than_that_of_transformers() -> None:
    known = dict(decoders())
    assert {"llama", "qwen3", "gemma3_text"} <= known.keys()
    asked = [{**SIZES, "num_key_value_heads": 4}, {**SIZES, "head_dim": 64}]
    asked += [GIVEN, {**GIVEN, **WINDOW}, {**GIVEN, **PART_ON}]
    found = [one for name, config in known.items() for fields in asked for one in differences(name, config, fields)]
    assert found == []


# --- DeepSeek V4 ---------------------------------------------------------------------------------------------


KIB = 1024
TOKENS = 128 * KIB  # bytes of the window of 128 latents
# An entry for 4 tokens: 512 elements of two bytes, an index of 128 bytes and its scale of two.
FINE_WINDOWS = TOKENS + 8 * (8 * KIB + 2 * KIB)
COARSE_WINDOWS = TOKENS + 128 * 4 * KIB


@pytest.mark.parametrize(
    ("config", "layers", "windows", "per_token"),
    [
        (FLASH, 43, 2 * TOKENS + 21 * FINE_WINDOWS + 20 * COARSE_WINDOWS, 21 * (1024 + 128 + 2) / 4 + 20 * 8),
        (PRO, 61, 30 * FINE_WINDOWS + 31 * COARSE_WINDOWS, 30 * (1024 + 128 + 2) / 4 + 31 * 8),
    ],
)
def test_bytes_per_token_and_windows(config, layers, windows, per_token) -> None:
    plan = plan_for(config, (16, 1, 1), (1, 1, 16))
    assert len(plan.model.layers) == layers
    assert plan.bytes_per_token == per_token
    assert plan.window_bytes == windows


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        (1000, (2, 2, 1, 1, 5)),  # 872 to 998: two blocks of 128, five of 32. 992 to 998: one of 8
        (32_000, (1, 63, 1, 2, 4)),  # 31,872 to 31,998: a block of 128. 7,999 entries, and 249
    ],
)
def test_a_prompt_is_sent_by_blocks(tokens: int, blocks: tuple[int, ...]) -> None:
    """Blocks hold 128 latents: of 1, 4 and 128 tokens. `blocks`: that are sent of each cache."""
    plan = plan_for(FLASH, (16, 1, 1), (1, 1, 16), tokens)
    of_tokens, fine, fine_states, coarse, coarse_states = blocks
    nbytes = 43 * of_tokens * TOKENS
    nbytes += 21 * fine * (128 * KIB + 128 * 128 + 128 * 2)
    nbytes += 21 * fine_states * 8 * (8 * KIB + 2 * KIB)
    nbytes += 20 * coarse * 128 * KIB
    nbytes += 20 * coarse_states * 32 * 4 * KIB
    assert plan.prompt.nbytes == nbytes
    assert plan.lanes == 16
    assert plan.staging.slots == 0


def test_stages_and_blocks_that_differ() -> None:
    model = read_model(PRO)
    sides = PlannedEngine("prefill", 8, 2, 1, 64), PlannedEngine("decode", 2, 1, 1, 128)
    plan = make_plan(model, *sides, step_tokens=4096, staging_slots=4)
    assert plan.bytes_per_token == 8903
    assert {flow.source.pp_rank for flow in plan.prompt.flows} == {0, 1}
    assert plan.unit_tokens == 64


def test_the_tables_name_each_cache() -> None:
    text = render(plan_for(FLASH, (2, 1, 1), (1, 1, 1)), [], None, None)
    assert re.search(r"20 x attn +│ 512 bfloat16 for 128 tokens +│ 160 B per token", text)
    assert "6,218.5 bytes per token, and 17.02 MiB per prompt for windows" in " ".join(text.split())


def test_other_caches_of_this_model_are_refused() -> None:
    with pytest.raises(PlanError, match="prefill: compressed caches need a block size of 32, 64, 128, not of 16"):
        planned(parse_model(CONFIG), block_size=16)
