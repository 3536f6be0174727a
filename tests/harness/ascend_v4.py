# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4's caches as vllm-ascend's own code makes them of a config.json, on emulated CANN."""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from harness.ascend_caches import allocate
from harness.compressed import Caches, config_of, spec_of


def ascend_caches(model_fields: Mapping[str, Any], block_size: int, num_blocks: int, drafts: bool = False) -> Caches:
    """The caches of vllm-ascend 0.23 with this `--block-size`. `drafts`: with those of the drafting layer (MTP)."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm_ascend.ops  # noqa: F401, I001  first: vllm-ascend's modules import each other in circles
    import vllm.v1.core.kv_cache_utils as utils
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
    from vllm_ascend.attention.dsa_v1 import AscendDSABackend
    from vllm_ascend.models import deepseek_v4 as model
    from vllm_ascend.models.layer.attention.layer import DSAAttention

    cache_config = CacheConfig(block_size=block_size, num_gpu_blocks_override=num_blocks)
    vllm_config = config_of(model_fields, cache_config)
    if drafts:
        vllm_config.speculative_config = SimpleNamespace(
            method="mtp",
            use_eagle=lambda: True,
            uses_draft_model=lambda: False,
            draft_model_config=vllm_config.model_config,
        )

    made = partial(spec_of, vllm_config=vllm_config)

    def compressor(ratio: int, head_dim: int) -> Any:
        entries = model._dsv4_block_sizes()[block_size][0][2 if ratio == 4 else 3]
        both = 1 + (ratio == 4)
        fields = {"state_dim": 2 * both * head_dim, "dtype": torch.float32, "block_size": entries}
        return made(model.AscendCompressorStateCache, compress_ratio=ratio, sliding_window=both * ratio, **fields)

    specs = {}
    head, index = model_fields["head_dim"], model_fields["index_head_dim"]
    for number, ratio in enumerate(
        model_fields["compress_ratios"][: None if drafts else model_fields["num_hidden_layers"]]
    ):
        name = f"{'model.layers' if number < model_fields['num_hidden_layers'] else 'mtp'}.{number}.self_attn"
        swa = model._dsv4_block_sizes()[block_size][0][1]
        specs[f"{name}.swa_cache"] = made(
            model.AscendDeepseekV4SWACache,
            head_dim=head,
            window_size=model_fields["sliding_window"],
            dtype=torch.bfloat16,
            cache_config=cache_config,
            block_size=swa,
        )
        if ratio > 1:
            specs[f"{name}.attn"] = made(DSAAttention, compress_ratio=ratio, head_size=head, kv_cache_dtype="auto")
            specs[f"{name}.compressor.state_cache"] = compressor(ratio, head)
        if ratio == 4:
            specs[f"{name}.indexer.k_cache"] = made(
                model.AscendDeepseekV4IndexerCache,
                head_dim=index,
                dtype=torch.int8,
                compress_ratio=4,
                cache_config=cache_config,
            )
            specs[f"{name}.indexer.compressor.state_cache"] = compressor(ratio, index)
    groups = utils.get_kv_cache_groups(vllm_config, specs)
    config = utils.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
    assert all(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in groups)
    layers_of = [(group.kv_cache_spec, group.layer_names) for group in groups]
    tensors = allocate(config, vllm_config, "cpu", AscendDSABackend, layers_of, use_compress=True)
    scheduler = utils.generate_scheduler_kv_cache_config([config])
    return Caches(config, vllm_config, tensors, utils.resolve_kv_cache_block_sizes(scheduler, vllm_config))
