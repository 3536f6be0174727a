# SPDX-License-Identifier: Apache-2.0
"""What is read from a model's config.json, and what is refused."""

import json

import pytest
from planned import DEEPSEEK, LLAMA, QWEN, assert_conserved

from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.model import Cached, CacheDtype, PlanError, parse_model, read_model

TINY = {
    "architectures": ["TinyForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "layers", "heads", "kv_heads", "mla", "widths"),
    [
        (DEEPSEEK, 61, 128, 1, True, (512, 64)),
        (QWEN, 94, 64, 4, False, (128, 128)),
        (LLAMA, 80, 64, 8, False, (128, 128)),
    ],
)
def test_known_models(config, layers, heads, kv_heads, mla, widths):
    model = read_model(config)
    assert (len(model.cached), model.attention_heads, model.kv_heads) == (layers, heads, kv_heads)
    assert (model.mla, model.widths, model.dtype) == (mla, widths, CacheDtype.BFLOAT16)
    assert set(model.cached) == {Cached.FULL}


def test_folder_of_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert read_model(tmp_path) == parse_model(TINY)


def test_heads_without_groups_and_head_size_of_its_own():
    model = parse_model({**TINY, "num_key_value_heads": None, "head_dim": 32})
    assert (model.kv_heads, model.widths) == (4, (32, 32))


@pytest.mark.parametrize("part", ["text_config", "llm_config"])
def test_text_part_of_a_larger_model(part):
    outer = {"architectures": ["LookForCausalLM"], "torch_dtype": "float16", "num_hidden_layers": 99}
    inner = {name: value for name, value in TINY.items() if name not in ("architectures", "torch_dtype")}
    model = parse_model({**outer, part: inner, "vision_config": {"num_hidden_layers": 7}})
    assert (model.name, len(model.cached), model.dtype) == ("LookForCausalLM", 4, CacheDtype.FLOAT16)


def test_sparse_attention_caches_a_key_more():
    config = {**json.loads(DEEPSEEK.read_text()), "index_head_dim": 128}
    assert parse_model(config).widths == (512, 64, 128)


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({}, "FFFF"),
        ({"sliding_window": 512}, "WWWW"),
        ({"sliding_window": 512, "use_sliding_window": False}, "FFFF"),
        ({"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 512}, "WWWF"),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, "SFSF"),
        ({"layers_block_type": ["mamba", "attention", "moe", "attention"], "mamba_d_conv": 4}, "SFNF"),
        ({"full_attention_interval": 4}, "SSSF"),
        ({"num_kv_shared_layers": 3}, "FNNN"),
    ],
)
def test_which_layers_have_a_cache(fields, kinds):
    letters = {"F": Cached.FULL, "W": Cached.WINDOW, "S": Cached.STATE, "N": Cached.NOTHING}
    model = parse_model({**TINY, **fields})
    assert model.cached == tuple(letters[kind] for kind in kinds)
    said = " ".join(model.notes)
    assert ("have a state" in said) == ("S" in kinds)
    assert ("have a window of" in said) == ("W" in kinds)


def test_layers_that_read_what_others_wrote_are_not_noted():
    kinds = [*["sliding_attention"] * 4, "full_attention"] * 6
    shared = {"num_hidden_layers": 30, "layer_types": kinds, "sliding_window": 512, "num_kv_shared_layers": 10}
    model = parse_model({**TINY, **shared})
    assert sum(kind is Cached.WINDOW for kind in model.cached) == 16
    assert model.notes[0].startswith("16 layers have a window")
    with pytest.raises(PlanError, match="no layer of this model has its own attention"):
        parse_model({**TINY, "num_kv_shared_layers": 4})


def test_only_attention_layers_of_a_hybrid_model_are_sent():
    kinds = ["linear_attention", "linear_attention", "full_attention", "sliding_attention", "full_attention"]
    model = parse_model({**TINY, "num_hidden_layers": 5, "layer_types": kinds, "sliding_window": 8})
    engines = PlannedEngine("prefill", 2, 2, 1, 128), PlannedEngine("decode", 1, 1, 1, 128)
    plan = make_plan(model, Layout.VLLM_ASCEND, *engines, step_tokens=128, staging_slots=2)
    assert (plan.model.layers, plan.model.cached_layers) == (5, 3)
    assert plan.model.bytes_per_token == 3 * 2 * (16 + 16) * 2
    assert [(s.first, s.stop, s.cached) for s in plan.prefill.stages] == [(0, 3, 1), (3, 5, 2)]
    assert_conserved(plan, [False, False, True, True, True], 2)


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
    assert model.dtype is dtype
    assert any("--kv-cache-dtype" in note for note in model.notes) == noted


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp8", 1), ("int8", 1), ("float16", 2), ("float32", 4)])
def test_bytes_of_a_dtype(dtype, itemsize):
    model = parse_model(TINY, CacheDtype(dtype))
    engines = PlannedEngine("prefill", 1, 1, 1, 128), PlannedEngine("decode", 1, 1, 1, 128)
    plan = make_plan(model, Layout.VLLM_ASCEND, *engines, step_tokens=128, staging_slots=2)
    assert plan.model.bytes_per_token_and_layer == 2 * (16 + 16) * itemsize


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_attention_heads": None}, "does not say num_attention_heads"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many', not a positive number"),
        ({"num_key_value_heads": [1, 2]}, r"num_key_value_heads is \[1, 2\], not a positive number"),
        ({"layer_types": 1}, "layer_types is 1, not a list of names"),
        ({"layer_types": [1, 2, 3, 4]}, r"layer_types is \[1, 2, 3, 4\], not a list of names"),
        ({"layers_block_type": "full_attention"}, "layers_block_type is 'full_attention', not a list of names"),
        ({"full_attention_interval": "x"}, "full_attention_interval is 'x', not a positive number"),
        ({"sliding_window": 8, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG', not a positive"),
        ({"num_kv_shared_layers": "x"}, "num_kv_shared_layers is 'x', not a positive number"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1, not a positive number"),
        ({"architectures": 1}, "architectures is 1, not a list of names"),
        ({"architectures": {}}, "architectures is {}, not a list of names"),
        ({"layer_types": ["full_attention"] * 3}, "lists 3 kinds of layers for 4 layers"),
        ({"layer_types": ["psychic_attention"] * 4}, "does not know layers of kind psychic_attention"),
        ({"layer_types": ["mamba"] * 4}, "no layer of this model has its own attention"),
        ({"mamba_d_conv": 4}, "has mamba_d_conv but no layer_types"),
        ({"compress_ratios": [4, 128]}, "compress_ratios: only deepseek_v4 is described, not None"),
        ({"v_head_dim": 32}, "keys of 16 and values of 32 elements per head"),
    ],
)
def test_what_is_not_described(fields, reason):
    with pytest.raises(PlanError, match=reason):
        parse_model({**TINY, **fields})


def test_latent_of_bytes_is_not_described():
    with pytest.raises(PlanError, match="with MLA, a KV cache of fp8 has another memory layout"):
        read_model(DEEPSEEK, CacheDtype.FP8)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_files_that_are_no_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(PlanError, match=r"config.json (is not JSON|is not a JSON object)"):
        read_model(tmp_path)
