# SPDX-License-Identifier: Apache-2.0
"""The caches of models that have attention and states in the same memory (Qwen3-Next, Qwen3.5), allocated by
vllm-ascend's own code."""

from types import SimpleNamespace
from typing import Any


def specs_of(config: Any, layers: int) -> dict[str, Any]:
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


def allocate(caches: Any, config: Any, device: str) -> dict[str, Any]:
    """Returns what vllm-ascend's model runner registers for `caches` on an engine with a connector.

    `caches`: vLLM's configuration of caches. `config`: vLLM's configuration, or what stands for it.
    """
    import vllm_ascend.ops  # noqa: F401  # the modules below import each other in a circle otherwise
    import vllm_ascend.worker.model_runner_v1 as runner
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackend

    itself = runner.NPUModelRunner.__new__(runner.NPUModelRunner)
    vars(itself).update(
        vllm_config=config,
        device=device,
        use_compress=False,
        use_sparse=False,
        runner_only_attn_layers=set(),
        use_hybrid_blocks=True,
        hybrid_with_attn_and_mamba=False,
        attn_backend=AscendAttentionBackend,
        model_config=config.model_config,
        kv_cache_config=caches,
        _kv_cache_spec_attn_group_iterator=lambda: (
            SimpleNamespace(backend=AscendAttentionBackend, kv_cache_spec=g.kv_cache_spec, layer_names=g.layer_names)
            for g in caches.kv_cache_groups
        ),
    )
    return itself._reshape_kv_cache_tensors(caches, itself._allocate_kv_cache_tensors(caches))
