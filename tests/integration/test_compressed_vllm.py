# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4's caches arrive byte for byte: those that vLLM's own code makes of a config.json, with its block tables,
over real transfers. tests/npu/test_compressed.py has vllm-ascend's."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.models.deepseek_v4.cpu", reason="this vLLM keeps V4's caches in another way")

from vllm.config import CacheConfig
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.core import kv_cache_utils as utils
from vllm.v1.worker.utils import allocate_kv_cache

from harness.compressed import (
    Caches,
    Cluster,
    assert_every_byte_arrives,
    assert_prefixes_are_hit,
    config_of,
    specs_of,
)
from harness.pool import long
from vllm_ascend_pd.connector.caches import layer_specs
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.compatibility import mismatch
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.core.topology import RankInfo, sharding

CONFIG = json.loads((Path(__file__).parents[1] / "unit/data/recipes/models.json").read_text())["deepseek-v4"]
BLOCK = 256


def vllm_caches(num_blocks: int, block_size: int = BLOCK) -> Caches:
    """The caches of an engine on the CPU, where V4's are in 8 bits ("fp8_ds_mla")."""
    cache_config = CacheConfig(block_size=block_size, num_gpu_blocks_override=num_blocks, cache_dtype="fp8_ds_mla")
    cache_config.kv_cache_layout = "BLHNC"  # as its backends ask for
    attention_config = SimpleNamespace(hisparse_config=None)
    vllm_config = config_of(CONFIG, cache_config, attention_config=attention_config)
    head, index = CONFIG["head_dim"], CONFIG["index_head_dim"]

    def kinds(cache: str, ratio: int) -> tuple[type, dict[str, Any]]:
        if cache == ".swa_cache":
            return DeepseekV4SWACache, {
                "head_dim": head,
                "window_size": CONFIG["sliding_window"],
                "dtype": torch.uint8,
                "cache_config": cache_config,
                "block_size": 64,
                "bounded_replay": False,
                "packed_bytes_per_token": 584,
                "packed_page_alignment": 576,
            }
        if cache == "":
            fields = {"head_dim": head, "kv_cache_dtype": "fp8_ds_mla", "kv_cache_torch_dtype": torch.uint8}
            return DeepseekV4CPUAttention, {"compress_ratio": ratio, **fields}
        if cache == ".indexer.k_cache":
            fields = {"head_dim": index + 4, "dtype": torch.uint8, "compress_ratio": 4, "cache_config": cache_config}
            return DeepseekV4IndexerCache, fields
        both = 1 + (ratio == 4)
        fields = {"state_dim": 2 * both * (index if "indexer" in cache else head), "dtype": torch.float32}
        return CompressorStateCache, {"block_size": 4 if ratio == 4 else 8, "sliding_window": both * ratio, **fields}

    layers = [f"model.layers.{number}.attn" for number in range(CONFIG["num_hidden_layers"])]
    groups = utils.get_kv_cache_groups(vllm_config, specs_of(vllm_config, layers, "", kinds))
    config = utils.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
    tensors = allocate_kv_cache(config, torch.device("cpu"), cache_config.get_resolved_kv_cache_layout())
    return Caches(config, vllm_config, tensors, heads_first=True)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(vllm_caches(800), vllm_caches(800), *request.param)
    yield made
    made.close()


SIDES = (
    long((2, 1), id="tp 2 to 1"),
    pytest.param((1, 2), id="tp 1 to 2"),
    pytest.param((4, 1), id="tp 4 to 1"),
    long((4, 4), id="tp 4 to 4"),
)


@pytest.mark.parametrize("ranks", SIDES, indirect=True)
def test_every_byte_that_decode_needs_arrives(ranks: Cluster) -> None:
    assert_every_byte_arrives(ranks)


@pytest.mark.parametrize("ranks", [(1, 1)], indirect=True)
def test_prefixes_that_are_cached(ranks: Cluster) -> None:
    assert_prefixes_are_hit(ranks, 4 * BLOCK)


def described(caches: Caches) -> RankCaches:
    return describe(caches.tensors, layer_specs(caches.config, caches.vllm_config), heads_first=True).description


def test_block_sizes_that_differ_are_refused() -> None:
    """vLLM keeps the scales of a block's entries behind all of them, so a part of a block is no run of bytes."""
    longer, caches = (described(vllm_caches(8, size)) for size in (2 * BLOCK, BLOCK))
    decode = EngineDescription("decode", "v4", 1, 1, (RankDescription(0, 0, "", "", caches),))
    prefill = RankInfo("prefill", "v4", "127.0.0.1", 0, sharding(1), 0, 1, (0,))
    assert mismatch(caches, prefill, decode) is None
    reason = mismatch(longer, prefill, decode)
    assert reason is not None
    assert "both sides need the same block size" in reason
