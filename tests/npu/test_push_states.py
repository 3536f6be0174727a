# SPDX-License-Identifier: Apache-2.0
"""States of Mamba and linear attention arrive on torch_npu tensors beside attention's KV, by a real Mooncake engine."""

import pytest

from harness.kv import Side
from harness.ranks import expect_delivery, prompts, run
from harness.states import GATED_DELTA, HybridDecode, HybridModel, HybridPair, with_states

pytestmark = pytest.mark.npu

BLOCK = 128
LINEAR = HybridModel(layers=2, heads=2, states=GATED_DELTA)


def results(rank: HybridDecode) -> set[str]:
    """Returns what comparisons with prefill's checksums have found."""
    return set(rank.verified)


def test_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other states, sizes and context parallelism: tests/integration/test_push_states.py."""
    monkeypatch.setenv("CANN_ON_HOST_DELAY_US", "500")
    sides = (Side(tp, num_blocks=24, block_size=BLOCK) for tp in (1, 2))
    pair = HybridPair(LINEAR, *sides, device="npu", config={"verify_kv": "all"})
    try:
        requests = with_states(prompts(pair, [1, 127, 128, 129, 300]))
        run(pair, requests, chunk=200)
        expect_delivery(pair, requests)
        assert pair.each(pair.d_ranks, "do", results) == [{"right"}] * 2
    finally:
        left = pair.close()
    assert left == []
