# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4's caches as vLLM's own code makes them of a config.json: its CPU model's layers, groups and memory."""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.worker.utils import allocate_kv_cache

from harness.compressed import Caches, config_of, spec_of


def vllm_caches(model_fields: Mapping[str, Any], num_blocks: int, block_size: int = 256) -> Caches:
    """The caches of an engine on the CPU, where V4's are in 8 bits ("fp8_ds_mla")."""
    cache_config = CacheConfig(block_size=block_size, num_gpu_blocks_override=num_blocks, cache_dtype="fp8_ds_mla")
    cache_config.kv_cache_layout = "BLHNC"  # as its backends ask for
    attention_config = SimpleNamespace(hisparse_config=None)
    vllm_config = config_of(model_fields, cache_config, attention_config=attention_config)

    made = partial(spec_of, vllm_config=vllm_config)

    def compressor(ratio: int, head_dim: int) -> Any:
        both = 1 + (ratio == 4)
        fields = {"state_dim": 2 * both * head_dim, "dtype": torch.float32, "block_size": 4 if ratio == 4 else 8}
        return made(CompressorStateCache, sliding_window=both * ratio, **fields)

    specs = {}
    head, index = model_fields["head_dim"], model_fields["index_head_dim"]
    for number, ratio in enumerate(model_fields["compress_ratios"][: model_fields["num_hidden_layers"]]):
        name = f"model.layers.{number}.attn"
        specs[f"{name}.swa_cache"] = made(
            DeepseekV4SWACache,
            head_dim=head,
            window_size=model_fields["sliding_window"],
            dtype=torch.uint8,
            cache_config=cache_config,
            block_size=64,
            bounded_replay=False,
            packed_bytes_per_token=584,
            packed_page_alignment=576,
        )
        if ratio > 1:
            specs[name] = made(
                DeepseekV4CPUAttention,
                compress_ratio=ratio,
                head_dim=head,
                kv_cache_dtype="fp8_ds_mla",
                kv_cache_torch_dtype=torch.uint8,
            )
            specs[f"{name}.compressor.state_cache"] = compressor(ratio, head)
        if ratio == 4:
            specs[f"{name}.indexer.k_cache"] = made(
                DeepseekV4IndexerCache,
                head_dim=index + 4,
                dtype=torch.uint8,
                compress_ratio=4,
                cache_config=cache_config,
            )
            specs[f"{name}.indexer.compressor.state_cache"] = compressor(ratio, index)
    groups = utils.get_kv_cache_groups(vllm_config, specs)
    config = utils.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
    tensors = allocate_kv_cache(config, torch.device("cpu"), cache_config.get_resolved_kv_cache_layout())
    scheduler = utils.generate_scheduler_kv_cache_config([config])
    return Caches(
        config, vllm_config, tensors, utils.resolve_kv_cache_block_sizes(scheduler, vllm_config), heads_first=True
    )
