# SPDX-License-Identifier: Apache-2.0
"""Settings that change what KV means are told by name; those that do not are left out."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Gemma3Config, LlamaConfig, Phi3Config, PretrainedConfig
from vllm.config.multimodal import MultiModalConfig

from vllm_ascend_pd.connector.model import model_settings
from vllm_ascend_pd.core.compatibility import different_settings
from vllm_ascend_pd.core.protocol import MAX_SETTINGS
from vllm_ascend_pd.core.text import is_name


def settings(config: PretrainedConfig, max_model_len: int = 4096, **model: Any) -> dict[str, str]:
    options = {
        "dtype": "torch.bfloat16",
        "quantization": None,
        "disable_sliding_window": False,
        "multimodal_config": None,
        "hf_image_processor_config": {},
        **model,
    }
    return model_settings(
        SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=config, hf_text_config=config.get_text_config(), max_model_len=max_model_len, **options
            ),
            cache_config=SimpleNamespace(),
        )
    )


def llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **changes})


def with_media(**options: Any) -> dict[str, str]:
    """`options`: fields of vLLM's own class."""
    return settings(llama(), multimodal_config=MultiModalConfig(**options))


def with_preprocessor(**config: Any) -> dict[str, str]:
    """`config`: the content of the checkpoint's `preprocessor_config.json`."""
    return settings(llama(), multimodal_config=MultiModalConfig(), hf_image_processor_config=config)


def difference(prefill: dict[str, str], decode: dict[str, str]) -> str:
    return different_settings(prefill, decode) or ""


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": "bfloat16"},
        {"bos_token_id": 7, "eos_token_id": [1, 2], "pad_token_id": 3},
        {"_name_or_path": "/elsewhere", "architectures": ["LlamaForCausalLM"]},
        {"attention_dropout": 0.5, "use_cache": False, "initializer_range": 0.3},
        {"max_position_embeddings": 8192},
        {"tie_word_embeddings": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_has_no_effect_on_kv_is_left_out(changes: dict[str, Any]) -> None:
    assert settings(llama(**changes)) == settings(llama())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
            "rope_parameters.rope_theta is 20000 on prefill, 10000 on decode",
        ),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 on prefill, 1e-06 on decode"),
        ({"attention_bias": True}, "attention_bias is true on prefill, false on decode"),
        ({"sliding_window": 128}, "sliding_window is 128 on prefill, not set on decode"),
        ({"an_unknown_key": "x"}, "an_unknown_key is x on prefill, not set on decode"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu on prefill, silu on decode"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_has_is_named_with_both_values(changes: dict[str, Any], named: str) -> None:
    assert difference(settings(llama(**changes)), settings(llama())) == f"the engines compute other KV: {named}"


def test_engines_own_settings() -> None:
    plain = settings(llama())
    half = settings(llama(), dtype="torch.float16")
    assert "dtype is torch.float16 on prefill, torch.bfloat16 on decode" in difference(half, plain)
    assert "quantization is fp8 on prefill, none on decode" in difference(settings(llama(), quantization="fp8"), plain)
    assert "disable_sliding_window is True" in difference(settings(llama(), disable_sliding_window=True), plain)


def test_the_longest_context_counts_where_rope_depends_on_it_and_nowhere_else() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi = Phi3Config(original_max_position_embeddings=4096, max_position_embeddings=131072, rope_parameters=factors)
    assert settings(llama(), 4096) == settings(llama(), 65536)
    assert settings(phi, 1024) == settings(phi, 4096)
    assert "longrope factors, by max_model_len is short on prefill, long on decode" in difference(
        settings(phi, 4096), settings(phi, 8192)
    )
    dynamic = [
        llama(max_position_embeddings=n, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        for n in (4096, 8192)
    ]
    assert "max_position_embeddings is 4096 on prefill, 8192 on decode" in difference(*map(settings, dynamic))


def test_a_multimodal_models_parts_are_told_apart() -> None:
    one, other = Gemma3Config(), Gemma3Config(vision_config={"num_hidden_layers": 3})
    assert "vision_config.num_hidden_layers is" in difference(settings(one), settings(other))
    assert settings(one)["hidden_size"] == str(one.text_config.hidden_size)
    assert not any(name.startswith("text_config.") for name in settings(one))


def test_what_is_long_is_compared_by_its_digest_and_all_of_it_is_bounded() -> None:
    quantized = {f"model.layers.{i}.mlp.up_proj.weight": "W8A8" for i in range(2000)}
    one = settings(llama(quantization_config=quantized, window_sizes=list(range(500))))
    other = settings(llama(quantization_config={**quantized, "model.layers.7.mlp.up_proj.weight": "FLOAT"}))
    assert "quantization_config is {" in difference(one, other)
    many = {f"key_{i}": i for i in range(2000)}
    for found in (one, settings(llama(**many)), settings(llama(text="a\x7f\n\x00" * 1000))):
        assert len(found) <= MAX_SETTINGS
        assert all(map(is_name, (*found.keys(), *found.values())))
    assert difference(settings(llama(**many)), settings(llama(**{**many, "key_999": 0}))) != ""


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        (
            {"mm_processor_kwargs": {"do_normalize": False}},
            {},
            "mm_processor_kwargs.do_normalize is false on prefill, not set on decode",
        ),
        (
            {"mm_processor_kwargs": {"images_kwargs": {"a": 1, "b": 2}}},
            {"mm_processor_kwargs": {"images_kwargs": {"b": 2, "a": 3}}},
            'mm_processor_kwargs.images_kwargs is {"a": 1, "b": 2} on prefill, {"a": 3, "b": 2} on decode',
        ),
        (
            {"media_io_kwargs": {"video": {"fps": 2}}},
            {"media_io_kwargs": {"video": {"fps": 4}}},
            'media_io_kwargs.video is {"fps": 2} on prefill, {"fps": 4} on decode',
        ),
        ({"video_pruning_rate": 0.5}, {}, "video_pruning is evs 0.5 on prefill, not set on decode"),
    ],
)
def test_how_media_are_processed_is_named(prefill: dict[str, Any], decode: dict[str, Any], named: str) -> None:
    """The same image becomes other values, with as many tokens and an equal hash."""
    assert difference(with_media(**prefill), with_media(**decode)).endswith(named)


def test_another_preprocessor_in_the_checkpoint_is_named() -> None:
    one = with_preprocessor(processor_class="A", patch_size=16, image_mean=[0.5, 0.5, 0.5], size={"longest_edge": 4096})
    assert one == with_preprocessor(patch_size=16, size={"longest_edge": 4096}, image_mean=[0.5, 0.5, 0.5])
    other = with_preprocessor(patch_size=16, image_mean=[0.5, 0.5, 0.4], size={"longest_edge": 4096})
    named = "preprocessor_config.image_mean is [0.5, 0.5, 0.5] on prefill, [0.5, 0.5, 0.4] on decode"
    assert difference(one, other).endswith(named)


def test_where_media_are_processed_and_how_they_are_cached_is_left_out() -> None:
    plain = with_media()
    assert plain == settings(llama()) == with_media(mm_processor_kwargs={}, video_pruning_rate=0.0)
    assert with_media(mm_processor_kwargs={"device": "cpu"}, mm_processor_cache_gb=1) == plain
    options = [{"images_kwargs": {"b": 2, "a": 3}, "x": 1}, {"x": 1, "images_kwargs": {"a": 3, "b": 2}}]
    assert with_media(mm_processor_kwargs=options[0]) == with_media(mm_processor_kwargs=options[1])
