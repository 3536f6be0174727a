# SPDX-License-Identifier: Apache-2.0
"""Fields of `config.json` whose default only the code of a model defines, and what that code fills in."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Mapping
from typing import Any

# By `model_type` without `_text`, from transformers 5.19 and vLLM 0.32 (`tests/unit/test_plan_model.py` compares).
# All other models take what `model.py` takes: a head is hidden_size / num_attention_heads, every attention head has a
# KV head of its own, and all layers see a window or none does.
_IN_CODE = {
    "head_dim": """
        afmoe cohere2_moe cosmos3_edge cwm deepseek_v4 diffusion_gemma ernie4_5 gemma gemma2 gemma3 gemma3n gemma4
        gemma4_unified glm glm4 gpt_oss helium hrm hy_v3 inkling jetmoe laguna llama4 mellum mimo_v2_flash minimax_m2
        minimax_m3_vl ministral3 muse_glimmer nemotron_h paddleocr_vl qwen3 qwen3_5 qwen3_5_moe qwen3_next qwen3_vl
        qwen4_exp seed_oss solar_open step3 step3p5 vaultgemma zamba zaya
    """,
    "num_key_value_heads": """
        bamba bitnet chameleon cosmos3_edge cwm dbrx deepseek_v4 diffusion_gemma dots1 emu3_text_model ernie4_5
        ernie4_5_moe ernie4_5_vl_moe evolla exaone4 exaone_moe falcon_h1 gemma gemma2 gemma3 gemma3n gemma4
        gemma4_unified glm glm4 glm4_moe glm4v glm4v_moe glm_ocr gpt_bigcode gpt_oss granite_swa hy_v3 inkling jamba
        jetmoe laguna lfm2 lfm2_moe llama4 mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl ministral ministral3
        mistral mixtral mllama_text_model muse_glimmer nemotron_h paddleocr_vl phi4_multimodal phimoe qwen2 qwen2_5_omni
        qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl
        qwen3_vl_moe qwen4_exp seed_oss smollm3 solar_open stablelm starcoder2 step3p5 vaultgemma zamba zaya
    """,
    "layer_types": """
        afmoe bamba cohere2 cohere2_moe cohere_compass cwm deepseek_v4 diffusion_gemma exaone4 exaone_moe falcon_h1
        falcon_mamba gemma2 gemma3 gemma3n gemma4 gemma4_unified gpt_oss granite_swa granitemoe_swa granitemoehybrid
        inkling jamba kimi_linear laguna lfm2 lfm2_moe llama4 mamba mellum mimo_v2_flash minimax minimax_m3_vl
        modernbert-decoder muse_glimmer nemotron_h olmo3 olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next qwen4_exp
        recurrent_gemma step3p5 vaultgemma zamba zaya
    """,
    "sliding_window": "ministral mistral moshi",
    "num_kv_shared_layers": "gemma3n",
    # Missing, it is false for these, whose code also says which layers see the window where it is true.
    "use_sliding_window": """
        dots1 qwen2 qwen2_5_omni qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe smollm3
    """,
}
_MODEL_TYPES = {field: frozenset(types.split()) for field, types in _IN_CODE.items()}


def in_code(field: str, model_type: str) -> bool:
    """Whether only the code of such models defines the default of `field`."""
    return model_type.removesuffix("_text") in _MODEL_TYPES[field]


_FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "head_dim",
    "num_key_value_heads",
    "layer_types",
    "sliding_window",
    "num_kv_shared_layers",
)
"""What `model.py` may ask for."""


def filled(text: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Returns the text part of a `config.json` with what transformers fills in, where it is installed."""
    missing = [field for field in _FIELDS if text.get(field) is None]
    read = _as_transformers(text, model_type)
    known = {field: getattr(read, field) for field in missing if hasattr(read, field)}
    return {**text, **{field: value for field, value in known.items() if field not in text or value is not None}}


def _as_transformers(text: Mapping[str, Any], model_type: str) -> Any:
    """Returns transformers' configuration of this part. None: transformers is missing, does not know the model, or
    refuses the file."""
    with contextlib.suppress(Exception), warnings.catch_warnings():  # its checks raise whatever they like
        warnings.simplefilter("ignore")
        importlib.import_module("transformers.utils.logging").set_verbosity_error()
        known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
        config = known[model_type]
        config = (getattr(config, "sub_configs", None) or {}).get("text_config", config)
        return config(**{field: value for field, value in text.items() if field != "model_type"})
    return None
