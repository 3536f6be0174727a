# SPDX-License-Identifier: Apache-2.0
"""Prints as JSON what the connector makes of sparse attention's caches, in vllm-ascend 0.30's own specs and allocation.

Its model runner makes the specs, of models' config.json. Two layers of DeepSeek V3.2, or GLM-5: the second one uses the
first one's index. `quantized`: the index in 8 bits. `packed`: latent and rope in 8 bits with their scales, too.
`indexed_heads`: a layer of MiniMax-M3, on one of two ranks.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.plugins import load_general_plugins

load_general_plugins()

import vllm_ascend.worker.model_runner_v1 as runner  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import MLAAttention  # noqa: E402
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs  # noqa: E402
from vllm_ascend.attention.indexer import AscendSFAIndexerBackend  # noqa: E402
from vllm_ascend.attention.sfa_v1 import AscendSFABackend  # noqa: E402
from vllm_ascend.attention.utils import get_sfa_qsfa_packed_head_dim  # noqa: E402
from vllm_ascend.core.kv_cache_interface import AscendSFAIndexerCacheSpec  # noqa: E402
from vllm_ascend.models.deepseek_v41 import cache_config as deepseek_v41  # noqa: E402
from vllm_ascend.models.minimax_m3.minimax_m3 import MiniMaxM3SparseAttention  # noqa: E402
from vllm_ascend.models.minimax_m3.msa_m3 import (  # noqa: E402
    AscendMiniMaxM3IndexerBackend,
    AscendMiniMaxM3IndexerCache,
    AscendMiniMaxM3SparseBackend,
)

from vllm_ascend_pd.connector import caches  # noqa: E402
from vllm_ascend_pd.core.caches import describe  # noqa: E402
from vllm_ascend_pd.core.layout import LayoutError  # noqa: E402
from vllm_ascend_pd.device.base import aligned_buffer  # noqa: E402
from vllm_ascend_pd.device.npu import REGISTRATION_BYTES  # noqa: E402

BLOCK, BLOCKS, LATENT, ROPE, INDEX = 128, 4, 512, 64, 128
TP = 2
FIRST, SECOND = (f"model.layers.{number}.self_attn" for number in range(2))
PACKED = get_sfa_qsfa_packed_head_dim(LATENT, ROPE)
MODELS = json.loads((Path(__file__).parents[1] / "unit/data/recipes/models.json").read_text(encoding="utf-8"))
"""The config.json of each model."""


def module(kind: type, **values: Any) -> Any:
    """A module with the values that its cache's spec is made of. It is not built: that takes a model's weights."""
    made = kind.__new__(kind)
    vars(made).update(values)
    return made


def modules_of(config: SimpleNamespace, packed: bool) -> dict[str, Any]:
    """The first layer's modules with a cache."""
    if (sparse := getattr(config, "sparse_attention_config", None)) is not None:
        own = {"kv_cache_dtype": "auto", "kv_cache_torch_dtype": torch.bfloat16, "head_dim": config.head_dim}
        heads = module(MiniMaxM3SparseAttention, num_kv_heads=config.num_key_value_heads // TP, **own)
        index = {"kv_cache_dtype": "auto", "dtype": torch.bfloat16, "head_dim": sparse["sparse_index_dim"]}
        return {f"{FIRST}.attn": heads, f"{FIRST}.attn.index_cache": module(AscendMiniMaxM3IndexerCache, **index)}
    impl = SimpleNamespace(enable_sparse_sfa_c8=packed)
    return {
        f"{FIRST}.attn": module(MLAAttention, impl=impl),
        f"{FIRST}.indexer.k_cache": module(DeepseekV32IndexerCache),
    }


def specs_of(model: str, *, packed: bool = False, quantized: bool = False, copies: int = 1) -> dict[str, Any]:
    """What vllm-ascend's model runner makes of a model's config.json: the specs of its first layer's caches.

    `packed`, `quantized`: latent and rope, and the index, in 8 bits. `copies`: ranks that copy the index.
    """
    config = SimpleNamespace(**MODELS[model].get("text_config", MODELS[model]))
    itself = module(
        runner.NPUModelRunner,
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=modules_of(config, packed)),
            cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        ),
        model_config=SimpleNamespace(hf_text_config=config),
        ascend_config=SimpleNamespace(is_sparse_li_c8_layer=lambda _: quantized, is_sparse_li_c4_layer=lambda _: False),
        block_size=BLOCK,
        dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        c8_cache_dtype=torch.int8,
        c8_k_cache_dtype=torch.int8,
        c8_k_scale_cache_dtype=torch.float16,
        use_compress=False,
        use_sparse=True,
        sparse_kv_offload_enabled=False,
        sfa_dcp_replicated_indexer_size=copies,
        shared_kv_cache_layers={},
    )
    return itself.get_kv_cache_spec()


MAIN, KEYS = specs_of("deepseek-v3.2").values()
PACKED_MAIN, INT8_KEYS = specs_of("deepseek-v3.2", packed=True, quantized=True).values()
OF_M3 = specs_of("minimax-m3")
HEADS, _ = OF_M3.values()
OTHER_MODELS = {
    "deepseek_v41": deepseek_v41.make_mla_cache_spec(block_size=BLOCK, head_size=512, compress_ratio=4),
    # `AscendGlm5Next`'s, which needs a model's configuration.
    "glm5_next": dataclasses.replace(
        MAIN, head_size=INDEX, model_version="glm5_next", tokens_per_state=4, indexes_kv_by_block_stride=True
    ),
}
REFUSED = {
    "cache_sparse_sfa_turboquant": dataclasses.replace(MAIN, cache_sparse_sfa_turboquant=True),
    "store_on_host": dataclasses.replace(MAIN, store_on_host=True),
    "indexes_kv_by_block_stride": dataclasses.replace(MAIN, indexes_kv_by_block_stride=True),
    "cache_sparse_li_c4": dataclasses.replace(KEYS, cache_sparse_li_c4=True),
}


def of(specs: dict[str, Any]) -> Any:
    group = KVCacheGroupSpec([*specs], UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs))
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])


def buffer(num_bytes: int) -> torch.Tensor:
    return aligned_buffer(num_bytes, REGISTRATION_BYTES, "cpu").zero_().view(torch.int8)


def allocate(specs: dict[str, Any], kv_cache_config: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """The views by vllm-ascend's `_reshape_kv_cache_tensors`; each layer's bytes as its `_allocate` cuts them."""
    raw: dict[str, tuple[torch.Tensor, ...]] = {}
    for layer, spec in specs.items():
        if isinstance(spec, AscendSFAIndexerCacheSpec):
            sizes = [spec.head_size * spec.dtype.itemsize, spec.scale_dim * spec.scale_dtype.itemsize]
        else:
            sizes = [PACKED] if getattr(spec, "uses_packed_sfa_main_cache", False) else [LATENT * 2, ROPE * 2]
        if spec is HEADS:
            sizes = [HEADS.page_size_bytes // BLOCK // 2] * 2
        tokens = kv_cache_config.num_blocks * BLOCK * getattr(spec, "sfa_dcp_replicated_indexer_size", 1)
        raw[layer] = tuple(buffer(tokens * size) for size in sizes if size)
    text = SimpleNamespace(index_head_dim=INDEX, model_type="deepseek_v32", kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)
    model = SimpleNamespace(hf_text_config=text, hf_config=text, use_mla=True)
    attention = MLAAttention.__new__(MLAAttention)
    vars(attention).update(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, get_kv_cache_spec=lambda config: MAIN)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(specs, attention)),
        model_config=model,
        quant_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    itself = runner.NPUModelRunner.__new__(runner.NPUModelRunner)
    vars(itself).update(
        vllm_config=config,
        model_config=model,
        kv_cache_config=kv_cache_config,
        use_compress=False,
        use_sparse=True,
        use_hybrid_blocks=False,
        hybrid_with_attn_and_mamba=False,
        sparse_kv_offload_enabled=False,
        c8_cache_dtype=torch.int8,
        runner_only_attn_layers=set(),
        _kv_cache_spec_attn_group_iterator=lambda: (
            SimpleNamespace(
                backend=backend_of(layer, spec),
                kv_cache_spec=spec,
                layer_names=[layer],
                kv_cache_group_id=0,
            )
            for layer, spec in specs.items()
        ),
    )
    return itself._reshape_kv_cache_tensors(kv_cache_config, raw, [BLOCK])


def backend_of(layer: str, spec: Any) -> Any:
    if spec is HEADS:
        return AscendMiniMaxM3SparseBackend
    if layer.endswith("index_cache"):
        return AscendMiniMaxM3IndexerBackend
    return AscendSFAIndexerBackend if "indexer" in layer else AscendSFABackend


def described(main: Any, keys: Any) -> dict[str, Any]:
    """Of two layers, the second of which uses the first one's index."""
    return described_of({f"{FIRST}.attn": main, f"{FIRST}.indexer.k_cache": keys, f"{SECOND}.attn": main})


def described_of(specs: dict[str, Any]) -> dict[str, Any]:
    kv_cache_config = of(specs)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=TP),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        quant_config=None,
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 4, hf_text_config=SimpleNamespace(num_hidden_layers=2)
        ),
    )
    ours = caches.layer_specs(kv_cache_config, config)
    registered = describe(allocate(specs, kv_cache_config), ours, heads_first=False).description
    geometries = [registered.geometry_of(tensor) for tensor in registered.tensors]
    return {
        "tensors": [(each.dtype, each.head_bytes, each.total_heads, each.block_size) for each in geometries],
        "announced": caches.caches_of_layers(ours),
        "groups": [group.block_size for group in caches.cache_groups(kv_cache_config)],
    }


def refusal(spec: Any) -> str:
    try:
        caches.check_kinds(of({f"{FIRST}.attn": spec}))
    except LayoutError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "plain": described(MAIN, KEYS),
                "quantized": described(MAIN, INT8_KEYS),
                "copied": described(*specs_of("deepseek-v3.2", quantized=True, copies=2).values()),
                "glm": described(*specs_of("glm-5").values()),
                "packed": described(PACKED_MAIN, INT8_KEYS),
                "indexed_heads": described_of(OF_M3),
                "other_models": {model: refusal(spec) for model, spec in OTHER_MODELS.items()},
                "refused": {field: refusal(spec) for field, spec in REFUSED.items()},
            }
        )
    )
