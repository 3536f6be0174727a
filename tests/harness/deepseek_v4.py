# SPDX-License-Identifier: Apache-2.0
"""A small DeepSeek V4 with random weights, in the names of DeepSeek's own checkpoints, and an engine that runs it."""

import json
from pathlib import Path
from typing import Any

from harness.engines import EngineConfig
from harness.models import BOS, EOS, PAD, ModelSpec

RATIOS = (0, 4, 128)
"""By layer: tokens of an entry. 0: the layer has its window alone."""
WINDOW = 128

DEEPSEEK_V4 = ModelSpec(
    "deepseek-v4",
    "deepseek_v4",
    layers=len(RATIOS),
    heads=8,
    kv_heads=1,
    head_size=512,
    hidden=256,
    intermediate_size=64,
    max_positions=2048,
    dtype="bfloat16",
)
"""Head size, index and ratios are those of the real models: the CPU's kernels take no others."""

FOR_V4 = EngineConfig(
    block_size=None,  # 256, whatever is asked for
    max_model_len=2048,  # up to here the index picks all entries, and Triton's kernels for it are not needed
    max_num_batched_tokens=384,  # chunks that end within entries of 128 tokens and within blocks
    kv_cache_bytes=256 << 20,
    dtype="bfloat16",
    args=("--tokenizer-mode", "hf"),
    env=(("VLLM_ASCEND_PD_TEST_WITHOUT_TRITON", "1"),),
)

_Q_RANK, _O_RANK, _O_GROUPS, _EXPERTS, _TOP, _STREAMS, _INDEX, _INDEX_HEADS = 64, 64, 4, 256, 6, 4, 128, 8

_SHARP = 2.5
"""What keys are scaled by. With 1, a token sees all others about alike, and the KV of a few is not missed."""


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Returns config.json of a model of `spec`."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "max_position_embeddings": spec.max_positions,
        "torch_dtype": spec.dtype,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "moe_intermediate_size": spec.intermediate_size,
        "compress_ratios": RATIOS,
        "sliding_window": WINDOW,
        "q_lora_rank": _Q_RANK,
        "o_lora_rank": _O_RANK,
        "o_groups": _O_GROUPS,
        "qk_rope_head_dim": 64,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "index_head_dim": _INDEX,
        "index_n_heads": _INDEX_HEADS,
        "index_topk": 512,
        "hc_mult": _STREAMS,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "num_hash_layers": 0,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": _TOP,
        "num_nextn_predict_layers": 0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def save_deepseek_v4(spec: ModelSpec, folder: Path) -> None:
    """Saves a model of `spec`; the tokenizer is saved by `make_model`."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(spec.seed)
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        """Makes outputs `gain` times as large as inputs."""
        values = torch.randn(rows, columns, generator=generator) * gain * columns**-0.5
        weights[name] = values.to(dtype)

    def vector(name: str, size: int, value: float, dtype: torch.dtype = torch.float32) -> None:
        weights[name] = torch.full((size,), value, dtype=dtype)

    def norm(name: str, size: int, value: float = 1.0) -> None:
        vector(f"{name}.weight", size, value, torch.bfloat16)

    def compressor(name: str, ratio: int, size: int) -> None:
        wide = size * (2 if ratio == 4 else 1)
        matrix(f"{name}.wkv.weight", wide, hidden)
        matrix(f"{name}.wgate.weight", wide, hidden)
        matrix(f"{name}.ape", ratio, wide, gain=wide**0.5, dtype=torch.float32)
        norm(f"{name}.norm", size, _SHARP)

    def streams(name: str, mixes: int, scales: int) -> None:
        matrix(f"{name}_fn", mixes, _STREAMS * hidden, dtype=torch.float32)
        vector(f"{name}_base", mixes, 0.0)
        vector(f"{name}_scale", scales, 0.5)

    hidden, head, heads = spec.hidden_size, spec.head_size, spec.heads
    matrix("embed.weight", spec.vocab_size, hidden, gain=hidden**0.5)
    matrix("head.weight", spec.vocab_size, hidden, gain=3.0)
    norm("norm", hidden)
    streams("hc_head", _STREAMS, 1)
    for number, ratio in enumerate(RATIOS):
        layer = f"layers.{number}"
        norm(f"{layer}.attn_norm", hidden)
        norm(f"{layer}.ffn_norm", hidden)
        for part in ("attn", "ffn"):
            streams(f"{layer}.hc_{part}", (2 + _STREAMS) * _STREAMS, 3)
        attn = f"{layer}.attn"
        vector(f"{attn}.attn_sink", heads, -4.0)
        matrix(f"{attn}.wq_a.weight", _Q_RANK, hidden)
        matrix(f"{attn}.wkv.weight", head, hidden)
        norm(f"{attn}.q_norm", _Q_RANK)
        norm(f"{attn}.kv_norm", head, _SHARP)
        matrix(f"{attn}.wq_b.weight", heads * head, _Q_RANK)
        matrix(f"{attn}.wo_a.weight", _O_GROUPS * _O_RANK, heads * head // _O_GROUPS, gain=2.0)
        matrix(f"{attn}.wo_b.weight", hidden, _O_GROUPS * _O_RANK, gain=2.0)
        if ratio:
            compressor(f"{attn}.compressor", ratio, head)
        if ratio == 4:
            matrix(f"{attn}.indexer.wq_b.weight", _INDEX_HEADS * _INDEX, _Q_RANK)
            matrix(f"{attn}.indexer.weights_proj.weight", _INDEX_HEADS, hidden)
            compressor(f"{attn}.indexer.compressor", ratio, _INDEX)
        ffn = f"{layer}.ffn"
        matrix(f"{ffn}.gate.weight", _EXPERTS, hidden)
        vector(f"{ffn}.gate.bias", _EXPERTS, 0.0)
        for part in (*(f"experts.{expert}" for expert in range(_EXPERTS)), "shared_experts"):
            for name in ("w1", "w3"):
                matrix(f"{ffn}.{part}.{name}.weight", spec.intermediate_size, hidden)
            matrix(f"{ffn}.{part}.w2.weight", hidden, spec.intermediate_size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(spec)), encoding="utf-8")
