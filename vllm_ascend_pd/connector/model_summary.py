# SPDX-License-Identifier: Apache-2.0
"""What must be equal on prefill and decode for their KV to mean the same, as text: the model, its draft, its media."""

from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.version import __version__ as vllm_version

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


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
    algorithm = getattr(multimodal, "mm_hasher_algorithm", None) or envs.VLLM_MM_HASHER_ALGORITHM
    return f"{vllm_version.partition('+')[0]} {algorithm} {vllm_config.model_config.model}"
