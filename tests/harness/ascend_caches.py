# SPDX-License-Identifier: Apache-2.0
"""Caches as vllm-ascend's own code makes and allocates them: of MLA and sparse attention (DeepSeek V3.2, GLM-5), and of
models that have attention and states in the same memory (Qwen3-Next, Qwen3.5)."""

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


def mla_cache_config(specs: dict[str, Any], num_blocks: int) -> Any:
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


def allocate_mla(caches: Any, device: str, quantized: Any = None) -> dict[str, tuple[torch.Tensor, ...]]:
    """Returns what vllm-ascend's model runner registers for `caches` on a decode engine.

    `quantized`: of MLA without sparse attention, how its checkpoint is quantized. None: sparse attention.
    """
    import vllm_ascend.ops  # noqa: F401  # the modules below import each other in a circle otherwise
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm_ascend.attention.mla_v1 import AscendMLABackend
    from vllm_ascend.attention.sfa_v1 import AscendSFABackend

    [group] = caches.kv_cache_groups
    specs = group.kv_cache_spec.kv_cache_specs
    first = next(iter(specs.values()))
    attention = MLAAttention.__new__(MLAAttention)
    vars(attention).update(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)
    text = SimpleNamespace(index_head_dim=INDEX, model_type="glm_moe_dsa")
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True, is_kv_producer=False),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(specs, attention)),
        quant_config=quantized,
        model_config=SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16, use_mla=True),
    )
    return allocate(
        caches,
        config,
        device,
        AscendSFABackend if quantized is None else AscendMLABackend,
        [(spec, [layer]) for layer, spec in specs.items()],
        use_sparse=quantized is None,
        c8_k_cache_dtype=first.c8_k_cache_dtype,
        c8_k_scale_cache_dtype=first.c8_k_scale_cache_dtype,
    )


def hybrid_specs(config: Any, layers: int) -> dict[str, Any]:
    """Returns the layers' specs as vllm-ascend's model runner makes them (`get_kv_cache_spec`), attention first.

    `config`: vLLM's configuration of a model like Qwen3.5: every fourth layer has attention, and there is an MTP layer.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    model, cache = config.model_config, config.cache_config
    kind, _ = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
    state = MambaSpec(
        block_size=cache.mamba_block_size,
        shapes=kind.get_mamba_state_shape_from_config(config),
        dtypes=kind.get_mamba_state_dtype_from_config(config),
        page_size_padded=cache.mamba_page_size_padded,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode=cache.mamba_cache_mode,
    )
    attention = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
        page_size_padded=state.page_size_bytes,
    )
    full = [f"language_model.model.layers.{n}.self_attn.attn" for n in range(layers) if n % 4 == 3]
    linear = [f"language_model.model.layers.{n}.linear_attn" for n in range(layers) if n % 4 != 3]
    return {**dict.fromkeys([*full, "mtp.layers.0.self_attn.attn"], attention), **dict.fromkeys(linear, state)}


def allocate_hybrid(caches: Any, config: Any, device: str) -> dict[str, Any]:
    """Returns what vllm-ascend's model runner registers for `caches` on an engine with a connector."""
    import vllm_ascend.ops  # noqa: F401  # the module below imports it in a circle otherwise
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackend

    groups = [(group.kv_cache_spec, group.layer_names) for group in caches.kv_cache_groups]
    return allocate(caches, config, device, AscendAttentionBackend, groups, use_hybrid_blocks=True)


def allocate(
    caches: Any, config: Any, device: str, backend: type, groups: list[tuple[Any, list[str]]], **fields: Any
) -> dict[str, Any]:
    """Returns the tensors that vllm-ascend's model runner makes: its own allocation and views.

    `caches`: vLLM's configuration of caches. `config`: vLLM's configuration, or what stands for it. `groups`: the spec
    and the layers of each attention group. `fields`: of the model runner.
    """
    import vllm_ascend.worker.model_runner_v1 as runner

    itself = runner.NPUModelRunner.__new__(runner.NPUModelRunner)
    defaults = dict.fromkeys(("use_compress", "use_sparse", "use_hybrid_blocks", "hybrid_with_attn_and_mamba"), False)
    vars(itself).update(
        defaults,
        vllm_config=config,
        model_config=config.model_config,
        kv_cache_config=caches,
        device=device,
        runner_only_attn_layers=set(),
        attn_backend=backend,
        _kv_cache_spec_attn_group_iterator=lambda: (
            SimpleNamespace(backend=backend, kv_cache_spec=spec, layer_names=layers) for spec, layers in groups
        ),
    )
    vars(itself).update(fields)
    return itself._reshape_kv_cache_tensors(caches, itself._allocate_kv_cache_tensors(caches))
