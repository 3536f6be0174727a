# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4's caches arrive byte for byte: those that vllm-ascend's own code makes of a config.json, with its block
tables, over real transfers."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.ascend_caches import allocate
from harness.compressed import (
    Caches,
    Cluster,
    assert_every_byte_arrives,
    assert_prefixes_are_hit,
    config_of,
    specs_of,
)
from harness.pool import long
from vllm_ascend_pd.connector.caches import cache_groups, layer_specs
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.tools.plan.engine import PlannedEngine, rank_caches
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.model import read_model

pytestmark = pytest.mark.npu

DATA = Path(__file__).parents[1] / "unit/data"
CONFIG = json.loads((DATA / "recipes/models.json").read_text())["deepseek-v4"]


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
    head, index = model_fields["head_dim"], model_fields["index_head_dim"]
    entries = model._dsv4_block_sizes()[block_size][0]

    def kinds(cache: str, ratio: int) -> tuple[type, dict[str, Any]]:
        if cache == ".swa_cache":
            return model.AscendDeepseekV4SWACache, {
                "head_dim": head,
                "window_size": model_fields["sliding_window"],
                "dtype": torch.bfloat16,
                "cache_config": cache_config,
                "block_size": entries[1],
            }
        if cache == ".attn":
            return DSAAttention, {"compress_ratio": ratio, "head_size": head, "kv_cache_dtype": "auto"}
        if cache == ".indexer.k_cache":
            fields = {"head_dim": index, "dtype": torch.int8, "compress_ratio": 4, "cache_config": cache_config}
            return model.AscendDeepseekV4IndexerCache, fields
        both = 1 + (ratio == 4)
        fields = {"state_dim": 2 * both * (index if "indexer" in cache else head), "dtype": torch.float32}
        fields |= {"block_size": entries[2 if ratio == 4 else 3], "compress_ratio": ratio}
        return model.AscendCompressorStateCache, {"sliding_window": both * ratio, **fields}

    of_model, ratios = model_fields["num_hidden_layers"], model_fields["compress_ratios"]
    layers = [f"model.layers.{number}.self_attn" for number in range(of_model)]
    layers += [f"mtp.{number}.self_attn" for number in range(of_model, len(ratios)) if drafts]
    groups = utils.get_kv_cache_groups(vllm_config, specs_of(vllm_config, layers, ".attn", kinds))
    config = utils.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 40)
    assert all(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in groups)
    layers_of = [(group.kv_cache_spec, group.layer_names) for group in groups]
    return Caches(
        config, vllm_config, allocate(config, vllm_config, "cpu", AscendDSABackend, layers_of, use_compress=True)
    )


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    (p_tp, p_block), (d_tp, d_block), drafts = request.param
    made = Cluster(ascend_caches(CONFIG, p_block, 600, drafts), ascend_caches(CONFIG, d_block, 600, drafts), p_tp, d_tp)
    yield made
    made.close()


SIDES = (
    long(((2, 32), (1, 32), False), id="tp 2 to 1"),
    pytest.param(((1, 64), (2, 32), True), id="tp 1 to 2, shorter blocks on decode, drafts"),
    pytest.param(((4, 32), (1, 64), True), id="tp 4 to 1, longer blocks on decode, drafts"),
    long(((4, 32), (4, 32), False), id="tp 4 to 4"),
)


@pytest.mark.parametrize("ranks", SIDES, indirect=True)
def test_every_byte_that_decode_needs_arrives(ranks: Cluster) -> None:
    assert_every_byte_arrives(ranks)


@pytest.mark.parametrize("ranks", [((1, 32), (1, 32), False)], indirect=True)
def test_prefixes_that_are_cached(ranks: Cluster) -> None:
    """Hits are multiples of the longest entry's blocks: 32 entries of 128 tokens."""
    assert_prefixes_are_hit(ranks, 4096)


def layouts(caches: RankCaches) -> dict[tuple[str, int], tuple[str, int, int, int]]:
    """By layer and part: element type, tokens of a block, bytes of a block, tokens of an entry."""
    return {
        (tensor.layer, tensor.part): (each.dtype, each.block_size, each.block_bytes, each.tokens_per_entry)
        for tensor in caches.tensors
        for each in [caches.geometry_of(tensor)]
    }


@pytest.mark.parametrize(("model", "block_size"), [("flash", 128), ("pro", 64), ("pro", 32)])
def test_plan_describes_the_caches_that_vllm_ascend_makes(model: str, block_size: int) -> None:
    """Of the real models: every layer's caches, the bytes of a token and of the windows."""
    file = DATA / f"deepseek-v4-{model}.json"
    made = ascend_caches(json.loads(file.read_text()), block_size, num_blocks=4)
    registered = describe(made.tensors, layer_specs(made.config, made.vllm_config), heads_first=False).description
    shape = read_model(file)
    engines = [PlannedEngine(side, 1, 1, 1, block_size) for side in ("prefill", "decode")]
    assert layouts(registered) == layouts(rank_caches(shape, engines[0], 0, 0, 4))
    windows = [group.window for group in cache_groups(made.config)]
    tokens = sent_once = 0.0
    for tensor in registered.tensors:
        each = registered.geometry_of(tensor)
        tokens += 0 if windows[each.group] else each.entry_bytes / each.tokens_per_entry
        sent_once += windows[each.group] * each.entry_bytes
    planned = make_plan(shape, *engines, step_tokens=8192, staging_slots=4)
    assert planned.bytes_per_token == tokens
    assert planned.window_bytes == sent_once
