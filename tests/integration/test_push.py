# SPDX-License-Identifier: Apache-2.0
"""Bytes on decode equal the truth: real processes, real gloo, real Mooncake over TCP, no model."""

from functools import reduce

import pytest

from harness.kv import (
    FLOAT32,
    GQA,
    HEAD_MAJOR,
    INDEXED_HEADS,
    INT8,
    MLA,
    SIX_HEADS,
    SPARSE_C8,
    TWO_HEADS,
    Side,
)
from harness.rank_programs import DecodeRank, Hooks
from harness.ranks import Pair, deliver, expect_delivery, pair_of_each, prefill, prompts, run
from vllm_ascend_pd.core.step import PrefillStep, Send
from vllm_ascend_pd.observe.stats import OVERLAP_RATIO, merged

SHAPES = {
    "GQA_TP4_TO_TP2": (GQA, Side(4), Side(2)),
    "GQA_TP4_TO_TP1": (GQA, Side(4), Side(1)),
    "GQA_TP2_TO_TP4": (GQA, Side(2), Side(4)),
    "GQA_TP1_TO_TP2": (GQA, Side(1), Side(2)),
    "GQA_TP2_TO_TP2": (GQA, Side(2), Side(2)),
    "HEAD_MAJOR_TP2_TO_TP1": (HEAD_MAJOR, Side(2), Side(1)),
    "HEAD_MAJOR_TP1_TO_TP2": (HEAD_MAJOR, Side(1), Side(2)),
    "MLA_TP2_TO_TP1": (MLA, Side(2), Side(1)),
    "BLOCK_32_TO_16_TP2_TO_TP1": (GQA, Side(2, block_size=32), Side(1, num_blocks=128, block_size=16)),
    "BLOCK_16_TO_32_TP2_TO_TP1": (GQA, Side(2, num_blocks=128), Side(1, block_size=32)),
    "BLOCK_64_TO_128_TP1_TO_TP1": (GQA, Side(1, num_blocks=16, block_size=64), Side(1, num_blocks=12, block_size=128)),
    "BLOCK_128_TO_64_TP1_TO_TP2": (GQA, Side(1, num_blocks=12, block_size=128), Side(2, num_blocks=16, block_size=64)),
    "MLA_BLOCK_32_TO_16_TP2_TO_TP1": (MLA, Side(2, block_size=32), Side(1, num_blocks=128)),
    "PP2_TP1_TO_TP2": (GQA, Side(1, stages=(1, 2)), Side(2)),
    "TP2_TO_PP2_TP1": (GQA, Side(2), Side(1, stages=(2, 1))),
    "PP2_TP2_TO_PP2_TP1_WITH_OTHER_LAYERS": (GQA, Side(2, stages=(1, 2)), Side(1, stages=(2, 1))),
    # More ranks than KV heads, on either side and on both.
    "REPLICAS_TP4_TO_TP1": (TWO_HEADS, Side(4), Side(1)),
    "REPLICAS_TP1_TO_TP4": (TWO_HEADS, Side(1), Side(4)),
    "REPLICAS_TP4_TO_TP4": (TWO_HEADS, Side(4), Side(4)),
    # Neither size divides the other.
    "TP3_TO_TP2": (SIX_HEADS, Side(3), Side(2)),
    "TP2_TO_TP3": (SIX_HEADS, Side(2), Side(3)),
    # Context parallelism, with blocks of 16 tokens: whole blocks in turn, or parts of one.
    "MLA_DCP2_TO_TP1": (MLA, Side(2, dcp=2, interleave=16), Side(1)),
    "MLA_TP1_TO_DCP2": (MLA, Side(1), Side(2, dcp=2, interleave=4)),
    "MLA_PCP2_DCP2_TO_DCP2": (MLA, Side(2, pcp=2, dcp=2, interleave=16), Side(2, dcp=2, interleave=8)),
    "REPLICAS_DCP2_TO_DCP2": (TWO_HEADS, Side(4, dcp=2, interleave=16), Side(4, dcp=2, interleave=16)),
    "SPLIT_PCP2_TO_DCP2": (TWO_HEADS, Side(1, pcp=2, interleave=8), Side(4, dcp=2, interleave=16)),
    "GATHERED_PP2_PCP2_TP2_TO_TP1": (GQA, Side(2, pcp=2, interleave=16, stages=(1, 2)), Side(1)),
    "INT8_TP2_TO_TP1": (INT8, Side(2), Side(1)),
    "SPARSE_C8_TP2_TO_TP1": (SPARSE_C8, Side(2), Side(1)),
    # Each rank of decode context parallelism has the whole index.
    "SPARSE_C8_DCP2_TO_DCP2": (SPARSE_C8, Side(2, dcp=2, interleave=16), Side(2, dcp=2, interleave=16)),
    "SPARSE_C8_DCP2_TO_TP1": (SPARSE_C8, Side(2, dcp=2, interleave=16), Side(1)),
    "SPARSE_C8_TP1_TO_DCP2": (SPARSE_C8, Side(1), Side(2, dcp=2, interleave=4)),
    "SPARSE_C8_PCP2_TO_DCP2": (SPARSE_C8, Side(1, pcp=2, interleave=16), Side(2, dcp=2, interleave=16)),
    "INDEXED_HEADS_TP2_TO_TP1": (INDEXED_HEADS, Side(2), Side(1)),
    "INDEXED_HEADS_TP2_TO_TP2": (INDEXED_HEADS, Side(2), Side(2)),
    "FLOAT32_TP2_TO_TP1": (FLOAT32, Side(2), Side(1)),
}

# For each of these the short form has one of the same kind.
LONG = (
    "GQA_TP4_TO_TP2",
    "HEAD_MAJOR_TP1_TO_TP2",
    "BLOCK_32_TO_16_TP2_TO_TP1",
    "BLOCK_64_TO_128_TP1_TO_TP1",
    "PP2_TP1_TO_TP2",
    "SPARSE_C8_DCP2_TO_TP1",
    "SPARSE_C8_TP1_TO_DCP2",
    "SPARSE_C8_PCP2_TO_DCP2",
    "INDEXED_HEADS_TP2_TO_TP2",
    "FLOAT32_TP2_TO_TP1",
)


pair = pair_of_each(SHAPES, long_ones=LONG)


# The second time blocks hold the first time's bytes: what is not written then shows. 40 tokens a step are less
# than three blocks; decode has two blocks of most prompts already.
@pytest.mark.parametrize(("chunk", "cached"), [(None, 0), (40, 0), (None, 32)], ids=["whole", "chunked", "cached"])
def test_bytes_arrive(pair: Pair, chunk: int | None, cached: int) -> None:
    deliver(pair, chunk, cached)


def test_parts_of_blocks_are_named_once(pair: Pair) -> None:
    """Right, but slow: each of prefill's ranks says so at its first transfer, and no rank elsewhere."""
    requests = prompts(pair, [40, 50])
    for _ in range(2):
        run(pair, requests)
        assert pair.wait_arrivals(len(requests))[1] == {}
        assert pair.wait_sent(len(requests)) == {}
    warned = [sum("is correct but slow" in text for text in texts) for texts in pair.each(pair.p_ranks, "warnings")]
    interleaves = {side.interleave for side in (pair.prefill, pair.decode) if side.span > side.block_size}
    whole_blocks = all(interleave == 16 for interleave in interleaves)
    assert warned == [0 if whole_blocks else 1] * len(pair.p_ranks)


def told(rank: DecodeRank) -> dict[str, int]:
    return rank.cached_tokens


def test_every_decode_rank_hears_what_prefill_had_cached(pair: Pair) -> None:
    requests = prompts(pair, [100, 40])
    tickets = pair.announce(requests)
    prefill(pair, requests, tickets, chunk=32, cached_tokens=48)
    assert pair.wait_arrivals(2)[1] == {}
    said = {ticket.ticket_id: 48 for ticket in tickets.values()}
    assert all(said.items() <= heard.items() for heard in pair.each(pair.d_ranks, "do", told))
    assert pair.wait_sent(2) == {}


def test_layers_nobody_announces_are_pushed_at_the_end(pair: Pair) -> None:
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [50])
    run(pair, requests, hooks=Hooks(saved=(0, 2)))
    expect_delivery(pair, requests)


def test_decode_does_not_wait_for_the_rest_of_a_step(pair: Pair) -> None:
    """What a model computes after its last layer's KV, and what a sampler does, is none of decode's."""
    pair.each(pair.d_ranks, "clear")
    [request] = requests = prompts(pair, [50])
    tickets = pair.announce(requests)
    by_id = {request.request_id: request}
    pair.each(pair.p_ranks, "stats")
    whole = Send(request.request_id, 0, 50, (request.p_blocks,), last=True)
    pair.each(pair.p_ranks, "step", PrefillStep(tickets=tickets, sends=[whole]), by_id, Hooks(ended=False))
    assert pair.wait_arrivals(1) == ({request.request_id}, {})
    assert pair.differences(requests) == []
    counts, shares = reduce(merged, pair.each(pair.p_ranks, "stats"), {})["histograms"][OVERLAP_RATIO.name]
    assert sum(counts) == sum(shares) > 0, "all of it has arrived before the end"
    pair.each(pair.p_ranks, "step", PrefillStep(finished={request.request_id: None}), by_id)
    assert pair.wait_sent(1) == {}
