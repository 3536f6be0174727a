# SPDX-License-Identifier: Apache-2.0
"""States of Mamba and linear attention arrive on torch_npu tensors beside attention's KV, by a real Mooncake engine."""

import pytest

from harness.kv import Side
from harness.pool import long
from harness.ranks import expect_delivery, prompts, run
from harness.states import GATED_DELTA, MAMBA2, HybridDecode, HybridModel, HybridPair, with_states

pytestmark = pytest.mark.npu

BLOCK = 128
LINEAR, MAMBA = (HybridModel(layers=2, heads=2, states=states) for states in (GATED_DELTA, MAMBA2))


def side(tp: int, dcp: int = 1) -> Side:
    return Side(tp, num_blocks=24, block_size=BLOCK, dcp=dcp, interleave=BLOCK if dcp > 1 else 1)


def results(rank: HybridDecode) -> set[str]:
    """Returns what comparisons with prefill's checksums have found."""
    return set(rank.verified)


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(LINEAR, side(1), side(2), id="linear tp 1 to 2"),
        long(LINEAR, side(2), side(1), id="linear tp 2 to 1"),
        long(MAMBA, side(1), side(2), id="mamba tp 1 to 2"),
        long(LINEAR, side(2), side(4, dcp=2), id="linear tp 2 to 4, context parallelism"),
    ],
)
def test_bytes_arrive(model: HybridModel, prefill: Side, decode: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANN_ON_HOST_DELAY_US", "500")
    pair = HybridPair(model, prefill, decode, device="npu", config={"verify_kv": "all"})
    try:
        requests = with_states(prompts(pair, [1, 127, 128, 129, 300]))
        run(pair, requests, chunk=200)
        expect_delivery(pair, requests)
        assert pair.each(pair.d_ranks, "do", results) == [{"right"}] * decode.ranks
    finally:
        left = pair.close()
    assert left == []
