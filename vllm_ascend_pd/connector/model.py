# SPDX-License-Identifier: Apache-2.0
"""What the model is, which settings change what its KV means, and which settings and versions are refused."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.core.protocol import MAX_SETTINGS
from vllm_ascend_pd.core.text import one_line

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


# Keys of a model's configuration without effect on KV. All other keys are compared, including unknown ones.
_WITHOUT_EFFECT = frozenset(
    {
        # Names and versions.
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "architectures",  # a part of the model's summary, which is compared separately
        "auto_map",
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
        # The data type of checkpoints. That of caches is compared separately.
        "dtype",
        "torch_dtype",
        # Training, and the outputs of transformers.
        "initializer_range",
        "initializer_factor",
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "output_router_logits",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        "pretraining_tp",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        # The output head.
        "tie_word_embeddings",
        "final_logit_softcapping",
        # Speculative decoding, which is compared separately.
        "num_nextn_predict_layers",
        "n_predict",
        # The longest context. `_rope` adds it if it has an effect.
        "max_position_embeddings",
        "max_sequence_length",
        "seq_length",
        "model_max_length",
    }
)
_WITHOUT_EFFECT_ENDINGS = ("_token_id", "_token_ids", "_dropout", "_dropout_prob")

_MAX_DEPTH = 3
_MAX_ITEMS = 32
"""Most items of a mapping that is listed key by key. Larger ones, such as lists of quantized modules, are digested."""
_MAX_VALUE_CHARS = 200
_SHOWN_CHARS = 60

_SCALED_BY_LENGTH = ("longrope", "dynamic", "su")
"""Types of RoPE whose angles depend on the longest context."""


_PROCESSOR_WITHOUT_EFFECT = "device"
"""The argument of multi-modal processors that says where they run."""
_PREPROCESSOR_WITHOUT_EFFECT = "processor_class"
"""The key of a model's `preprocessor_config.json` that names the class which also handles text."""


def model_settings(vllm_config: "VllmConfig") -> dict[str, str]:
    """Returns the settings by name, at most `MAX_SETTINGS`. Keys without a value are left out."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    text, whole = model.hf_text_config.to_dict(), model.hf_config.to_dict()
    # If a model has several parts, the text model's keys have no prefix.
    found = dict(_flat({key: value for key, value in whole.items() if value != text}))
    found |= _flat(text)
    found |= _rope(text, model.max_model_len)
    found |= _media(model)
    found["dtype"] = str(model.dtype)  # caches in 8 bits do not show it
    found["quantization"] = str(model.quantization or "none")
    found["disable_sliding_window"] = str(bool(model.disable_sliding_window))
    found["calculate_kv_scales"] = str(bool(getattr(cache, "calculate_kv_scales", False)))
    if len(found) <= MAX_SETTINGS:
        return found
    kept = dict(sorted(found.items())[: MAX_SETTINGS - 1])
    rest = {key: value for key, value in found.items() if key not in kept}
    return {**kept, "others": _short(json.dumps(rest, sort_keys=True))}


def _flat(config: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if value is None or key in _WITHOUT_EFFECT or key.endswith(_WITHOUT_EFFECT_ENDINGS):
            continue
        name = one_line(f"{prefix}{key}", _MAX_VALUE_CHARS)
        if isinstance(value, dict) and len(value) <= _MAX_ITEMS and depth < _MAX_DEPTH:
            yield from _flat(value, f"{name}.", depth + 1)
        else:
            yield name, _short(_text(value))


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 10000.0 is the same as 10000
    return json.dumps(value, sort_keys=True, default=str).strip('"')


def _short(text: str) -> str:
    """Returns `text`, or the beginning of a long one with a digest of all of it."""
    if len(text) > _MAX_VALUE_CHARS:
        text = f"{text[:_SHOWN_CHARS]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:16]})"
    return one_line(text, 2 * _MAX_VALUE_CHARS)


def _media(model: "ModelConfig") -> dict[str, str]:
    """Returns how images, sounds and videos are read and processed: the engine's options and the checkpoint's
    `preprocessor_config.json`. vLLM's hashes cover neither."""
    multimodal = model.multimodal_config
    if multimodal is None:
        return {}
    checkpoint = {k: v for k, v in model.hf_image_processor_config.items() if k != _PREPROCESSOR_WITHOUT_EFFECT}
    found = dict(_flat(checkpoint, "preprocessor_config."))
    for option in ("mm_processor_kwargs", "media_io_kwargs"):
        for key, value in (getattr(multimodal, option, None) or {}).items():
            if (option, key) != ("mm_processor_kwargs", _PROCESSOR_WITHOUT_EFFECT):
                found[one_line(f"{option}.{key}", _MAX_VALUE_CHARS)] = _short(_text(value))
    if rate := getattr(multimodal, "video_pruning_rate", None):
        found["video_pruning"] = f"{getattr(multimodal, 'video_pruning_method', 'evs')} {rate}"
    return found


def _rope(text: Mapping[str, Any], max_model_len: int) -> dict[str, str]:
    kinds = set(_values(text, ("rope_type", "type")))
    found = {}
    if kinds & {*_SCALED_BY_LENGTH}:
        found["max_position_embeddings"] = str(text.get("max_position_embeddings"))
    originals = [*_values(text, ("original_max_position_embeddings",))]
    if kinds & {"longrope", "su"} and originals:
        # If the longest context needs the long factors, vLLM uses them for all requests.
        found["longrope factors, by max_model_len"] = "long" if max_model_len > originals[0] else "short"
    return found


def _values(config: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Yields the values of all keys with these names, at any depth of mappings."""
    if isinstance(config, dict):
        for key, value in config.items():
            if key in names and isinstance(value, str | int):
                yield value
            else:
                yield from _values(value, names)


# What must be equal on prefill and decode for their KV to mean the same, as text: the model, its draft, its media.


def model_summary(vllm_config: "VllmConfig") -> str:
    """Returns the model's shape in one line. It must be equal on both sides."""
    return _summary(vllm_config.model_config)


def draft_summary(vllm_config: "VllmConfig") -> str:
    """Returns the same for the model or head that drafts, if it has caches of its own; "" otherwise."""
    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return ""
    return f"{speculative.method} {_summary(speculative.draft_model_config)}"


def _summary(model: "ModelConfig") -> str:
    text = model.hf_text_config
    architecture = (getattr(model.hf_config, "architectures", None) or ["?"])[0]
    return (
        f"{architecture} with {text.num_hidden_layers} layers of hidden size {text.hidden_size}, "
        f"{text.num_attention_heads} heads, {model.get_total_num_kv_heads()} KV heads, vocabulary {text.vocab_size}"
    )


def media_hashing(vllm_config: "VllmConfig") -> str:
    """Returns how vLLM hashes images, sounds and videos by their content; "" if it does not.

    vLLM hashes them only if the prefix cache or the multi-modal processor cache is on. Engines with different texts
    may have different hashes for the same media: the model's path goes into a hash, and some versions differ in how
    they encode what they hash.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return ""
    if not multimodal.mm_processor_cache_gb and not vllm_config.cache_config.enable_prefix_caching:
        return ""
    from vllm import envs
    from vllm.version import __version__ as vllm_version

    algorithm = getattr(multimodal, "mm_hasher_algorithm", None) or envs.VLLM_MM_HASHER_ALGORITHM
    return f"{vllm_version.partition('+')[0]} {algorithm} {vllm_config.model_config.model}"
