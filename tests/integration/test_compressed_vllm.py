# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4's caches arrive byte for byte: those that vLLM's own code makes of a config.json, with its block tables,
over real transfers. tests/npu/test_compressed.py has vllm-ascend's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.models.deepseek_v4.cpu", reason="this vLLM keeps V4's caches in another way")

from harness.compressed import Caches, Cluster, assert_every_byte_arrives, assert_prefixes_are_hit
from harness.pool import long
from harness.vllm_v4 import vllm_caches
from vllm_ascend_pd.connector.caches import layer_specs
from vllm_ascend_pd.core.caches import describe
from vllm_ascend_pd.core.compatibility import mismatch
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.core.topology import RankInfo, sharding

CONFIG = json.loads((Path(__file__).parents[1] / "unit/data/recipes/models.json").read_text())["deepseek-v4"]
BLOCK = 256


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(vllm_caches(CONFIG, 800), vllm_caches(CONFIG, 800), *request.param)
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
    longer, caches = (described(vllm_caches(CONFIG, 8, size)) for size in (2 * BLOCK, BLOCK))
    decode = EngineDescription("decode", "v4", 1, 1, (RankDescription(0, 0, "", "", caches),))
    prefill = RankInfo("prefill", "v4", "127.0.0.1", 0, sharding(1), 0, 1, (0,))
    assert mismatch(caches, prefill, decode) is None
    reason = mismatch(longer, prefill, decode)
    assert reason is not None
    assert "both sides need the same block size" in reason
