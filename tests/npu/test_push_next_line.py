# SPDX-License-Identifier: Apache-2.0
"""Sparse attention's caches as vllm-ascend 0.30 allocates them (DeepSeek V3.2, GLM-5) arrive byte by byte.

So do layers that use buffers in turn, where AscendStore's own thread waits for the buffers.
"""

from collections.abc import Iterator

import pytest
import torch

from harness.kv import Model, Side
from harness.pool import long
from harness.rank_programs import DecodeRank
from harness.ranks import Pair, expect_delivery, prompts, run
from next_line_ranks import VARIABLE, SparseDecodeRank, SparseModel, SparsePrefillRank, StorePrefillRank

pytestmark = pytest.mark.npu

BF16, INT8, F16 = torch.bfloat16, torch.int8, torch.float16
PLAIN = SparseModel(widths=(512, 64, 128), replicated=True)
INT8_INDEX = SparseModel(widths=(512, 64, 128, 1), dtypes=(BF16, BF16, INT8, F16), replicated=True, keys="INT8_KEYS")
PACKED = SparseModel(
    widths=(656, 128, 1), dtypes=(INT8, INT8, F16), replicated=True, main="PACKED_MAIN", keys="INT8_KEYS"
)
# Each rank imports vllm-ascend: the short form compares what it allocates (contract/test_contract_0_30.py).
SHAPES = {
    "plain-tp2-to-tp1": (PLAIN, 2, 1),
    "plain-tp1-to-tp1": (PLAIN, 1, 1),
    "int8-index-tp2-to-tp1": (INT8_INDEX, 2, 1),
    "packed-tp2-to-tp1": (PACKED, 2, 1),
}


@pytest.fixture(scope="module", params=[long(shape) for shape in SHAPES])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    model, *sizes = SHAPES[request.param]
    sides = (Side(tp, num_blocks=24, block_size=128) for tp in sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANN_ON_HOST_DELAY_US", "500")
        patch.setenv(VARIABLE, "0.30")
        made = Pair(model, *sides, device="npu", programs=(SparsePrefillRank, SparseDecodeRank))
        yield made
        assert made.close() == []


@pytest.mark.timeout(300)
def test_bytes_arrive(pair: Pair) -> None:
    requests = prompts(pair, [1, 127, 128, 129, 300])
    run(pair, requests, chunk=200)
    expect_delivery(pair, requests)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", [1, 2])
def test_ascend_store_waits_for_buffers_that_layers_use_in_turn(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 layers in 4 buffers. Side streams are late, so a buffer that is not waited for has another layer's KV."""
    monkeypatch.setenv("CANN_ON_HOST_DELAY_SIDE_US", "20000")
    monkeypatch.setenv(VARIABLE, "0.30")
    sides = Side(tp, num_blocks=24, block_size=128, buffers=4), Side(1, num_blocks=24, block_size=128)
    pair = Pair(Model(layers=12), *sides, device="npu", programs=(StorePrefillRank, DecodeRank))
    requests = prompts(pair, [1, 127, 128, 129, 300])
    run(pair, requests, chunk=200)
    expect_delivery(pair, requests)
    for waited in pair.each(pair.p_ranks, "waited"):
        steps = waited["MainThread"] / 4  # the first layers of a step load nothing, so the model's thread waits
        assert waited["KVCacheStoreLayerRecvingThread"] == 8 * steps > 0
    assert pair.close() == []
