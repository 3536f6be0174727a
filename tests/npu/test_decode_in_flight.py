# SPDX-License-Identifier: Apache-2.0
"""Decode's blocks change hands while a queued step still writes to them: nothing is pushed before that step has run."""

import pytest

import cann_on_host
from harness.kv import Model, Side
from harness.rank_programs import DecodeRank
from harness.ranks import MakePair, prefill, prompts

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

BLOCK = 128
MODEL = Model(layers=2, widths=(32, 32))
LATE_US = 200_000


def write_late(rank: DecodeRank, blocks: list[int]) -> None:
    """Writes as a step does that was queued for the previous request."""
    cann_on_host.set_delays(LATE_US, 0)
    for caches in rank.caches.values():
        for cache in caches:
            for block in blocks:
                cache[block].fill_(1)
    cann_on_host.set_delays(0, 0)


def test_what_decode_has_queued_comes_first(make_pair: MakePair) -> None:
    pair = make_pair(MODEL, *(Side(1, num_blocks=8, block_size=BLOCK) for _ in "PD"), device="npu")
    requests = prompts(pair, [BLOCK + 2], seed=1)
    pair.each(pair.d_ranks, "do", write_late, requests[0].d_blocks)
    prefill(pair, requests, pair.announce(requests))
    arrivals = pair.wait_arrivals(len(requests))
    differences = pair.differences(requests)
    assert pair.wait_sent(len(requests)) == {}
    assert arrivals == ({prompt.request_id for prompt in requests}, {})
    assert differences == []
