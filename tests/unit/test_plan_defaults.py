# SPDX-License-Identifier: Apache-2.0
"""What a config.json leaves to the model's code is as transformers reads it, or refused."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ascend_pd.tools.plan.model import Cached, PlanError, parse_model

SIZES = {"hidden_size": 640, "num_attention_heads": 20, "num_hidden_layers": 12, "dtype": "bfloat16"}
LISTED = {"layer_types": ["full_attention"] * 12}
GIVEN = {**SIZES, "head_dim": 64, "num_key_value_heads": 4}
WINDOW = {"sliding_window": 512}
PART_ON = {**WINDOW, "use_sliding_window": True, "max_window_layers": 5}
LETTERS = {Cached.FULL: "F", Cached.WINDOW: "W"}


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"model_type": "gemma3_text", **SIZES, "num_key_value_heads": 4, **LISTED}, "head_dim"),
        ({"model_type": "gemma3", "text_config": {**SIZES, "num_key_value_heads": 4, **LISTED}}, "head_dim"),
        ({"model_type": "qwen3", **SIZES, "num_key_value_heads": 4}, "head_dim"),
        ({"model_type": "qwen3", **SIZES, "num_key_value_heads": 4, "head_dim": None}, "head_dim"),
        ({"model_type": "qwen3", **SIZES, "head_dim": 64}, "num_key_value_heads"),
        ({"model_type": "gemma2", **GIVEN, **WINDOW}, "layer_types"),
        ({"model_type": "gemma3_text", **GIVEN, **WINDOW}, "layer_types"),
        ({"model_type": "llama4_text", **GIVEN, "attention_chunk_size": 8192}, "layer_types"),
        ({"model_type": "qwen2", **GIVEN, **PART_ON}, "layer_types"),
        ({"model_type": "of-its-own", **GIVEN, **PART_ON}, "layer_types"),
        ({"model_type": "mistral", **GIVEN}, "sliding_window"),
        ({"model_type": "gemma3n_text", **GIVEN, **LISTED}, "num_kv_shared_layers"),
    ],
)
def test_what_only_the_code_knows_is_asked_for(fields: dict[str, Any], missing: str) -> None:
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
    windowed = [kind is Cached.WINDOW for kind in ours.cached]
    if windowed != ([kind != "full_attention" for kind in kinds] if kinds else [bool(window)] * len(windowed)):
        found.append(f"layer_types {kinds}, window {window}, ours {windowed}")
    return [f"{model_type}, {fields}: {one}" for one in found]


def test_no_figure_is_other_than_that_of_transformers() -> None:
    known = dict(decoders())
    assert {"llama", "qwen3", "gemma3_text"} <= known.keys()
    asked = [{**SIZES, "num_key_value_heads": 4}, {**SIZES, "head_dim": 64}]
    asked += [GIVEN, {**GIVEN, **WINDOW}, {**GIVEN, **PART_ON}]
    found = [one for name, config in known.items() for fields in asked for one in differences(name, config, fields)]
    assert found == []
