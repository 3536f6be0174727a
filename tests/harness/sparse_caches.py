# SPDX-License-Identifier: Apache-2.0
"""The caches of MLA and of sparse attention (DeepSeek V3.2, GLM-5), allocated by vllm-ascend's own code."""

from types import SimpleNamespace
from typing import Any

import torch

LATENT, ROPE, INDEX = 512, 64, 128


def sparse_spec(block_size: int, *, packed: bool, index: bool, index_int8: bool = True) -> Any:
    """Returns a layer's spec as vllm-ascend makes it.

    `packed`: latent and rope in 8 bits with their scales. `index`: whether the layer has keys of its own for the index;
    GLM-5.2's layers share them. `index_int8`: those keys in 8 bits, with a scale each.
    """
    from vllm_ascend.attention.utils import get_sfa_qsfa_packed_head_dim
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

    kept = (get_sfa_qsfa_packed_head_dim(LATENT, ROPE), 0) if packed else (LATENT, ROPE)
    sizes = (*kept, INDEX if index else 0)
    return AscendMLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=sum(sizes),
        sparse_head_dim=sizes,
        dtype=torch.bfloat16,
        cache_sparse_sfa_c8=packed,
        cache_sparse_li_c8=index and index_int8,
    )


def cache_config(specs: dict[str, Any], num_blocks: int) -> Any:
    """Returns vLLM's configuration of caches, all layers in one group, as vLLM makes it of layers that differ."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, UniformTypeKVCacheSpecs

    block_size = next(iter(specs.values())).block_size
    group = UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=specs)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=num_blocks * spec.page_size_bytes, shared_by=[layer]) for layer, spec in specs.items()
        ],
        kv_cache_groups=[KVCacheGroupSpec([*specs], group)],
    )


def allocate(caches: Any, device: str, quantized: Any = None) -> dict[str, tuple[torch.Tensor, ...]]:
    """Returns what vllm-ascend's model runner registers for `caches` on a decode engine.

    `quantized`: of MLA without sparse attention, how its checkpoint is quantized. None: sparse attention.
    """
    import vllm_ascend.ops  # noqa: F401  # the modules below import each other in a circle otherwise
    import vllm_ascend.worker.model_runner_v1 as runner
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm_ascend.attention.mla_v1 import AscendMLABackend
    from vllm_ascend.attention.sfa_v1 import AscendSFABackend

    [group] = caches.kv_cache_groups
    specs = group.kv_cache_spec.kv_cache_specs
    first = next(iter(specs.values()))
    attention = MLAAttention.__new__(MLAAttention)
    vars(attention).update(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)
    text = SimpleNamespace(index_head_dim=INDEX, model_type="glm_moe_dsa")
    model = SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16, use_mla=True)
    backend = AscendSFABackend if quantized is None else AscendMLABackend
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True, is_kv_producer=False),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(specs, attention)),
        quant_config=quantized,
        model_config=model,
    )
    itself = runner.NPUModelRunner.__new__(runner.NPUModelRunner)
    vars(itself).update(
        vllm_config=config,
        model_config=model,
        kv_cache_config=caches,
        device=device,
        use_compress=False,
        use_sparse=quantized is None,
        use_hybrid_blocks=False,
        hybrid_with_attn_and_mamba=False,
        runner_only_attn_layers=set(),
        attn_backend=backend,
        c8_k_cache_dtype=first.c8_k_cache_dtype,
        c8_k_scale_cache_dtype=first.c8_k_scale_cache_dtype,
        _kv_cache_spec_attn_group_iterator=lambda: (
            SimpleNamespace(backend=backend, kv_cache_spec=spec, layer_names=[layer]) for layer, spec in specs.items()
        ),
    )
    return itself._reshape_kv_cache_tensors(caches, itself._allocate_kv_cache_tensors(caches))
