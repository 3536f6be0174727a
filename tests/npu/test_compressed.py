# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4's caches arrive byte for byte: those that vllm-ascend's own code makes of a config.json, with its block
tables, over real transfers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ascend_v4 import ascend_caches
from harness.compressed import Cluster, assert_every_byte_arrives, assert_prefixes_are_hit
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
