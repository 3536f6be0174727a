# SPDX-License-Identifier: Apache-2.0
"""Sizes, mappings and units that are refused, and what a mapping needs. `test_plan.py` uses mappings of all sizes."""

import time

import msgspec
import numpy as np
import pytest
from simulate import all_sizes, sizes

from vllm_ascend_pd.core.layout import CacheTensor, Geometry, LayoutError, Order, RankCaches
from vllm_ascend_pd.core.plan import Units, make_mapping, slot_bytes, why_slow
from vllm_ascend_pd.core.topology import (
    Sharding,
    TopologyError,
    regroup_groups,
    replicas,
    sharding,
    writers_to,
)

NOT_FITTING = [(tp, heads) for heads in range(1, 9) for tp in range(1, 9) if tp not in sizes(heads)]


@pytest.mark.parametrize(("tp", "heads"), [*NOT_FITTING, (0, 1), (1, 0), (-1, 2), (2, -1)])
def test_sizes_that_do_not_fit(tp, heads):
    for use in (
        lambda: replicas(tp, heads),
        lambda: Sharding(tp, (0,)).heads(0, heads),
        lambda: Sharding(tp, (0,)).holders(0, heads, 0),
        lambda: regroup_groups(sharding(tp), heads),
        lambda: writers_to(0, sharding(tp), sharding(1), heads, 0, True),
        lambda: writers_to(0, sharding(1), sharding(tp), heads, 0, True),
    ):
        with pytest.raises(TopologyError):
            use()


def test_replicas_divide_the_tickets():
    """Over as many consecutive hashes as there are replicas, every prefill rank writes exactly once."""
    for heads, tp, _ in all_sizes():
        hashes = range(replicas(tp, heads))
        turns = [rank for each in hashes for rank in writers_to(0, sharding(1), sharding(tp), heads, each, True)]
        assert sorted(turns) == [*range(tp)]


@pytest.mark.parametrize(
    ("dealt", "heads"),
    [
        (sharding(4, dcp=2), 4),  # no two ranks hold the same heads
        (sharding(12, dcp=4), 2),  # a group of 4 among 6 ranks
        (Sharding(2, (0, 0, 1)), 1),  # half a tensor-parallel group
        (Sharding(2, (0, 2)), 1),  # a share that nobody holds
        (Sharding(4, (0, 0, 0, 1)), 1),
        (Sharding(1, (2**31 - 1,)), 1),
    ],
)
@pytest.mark.timeout(10)
def test_tokens_that_are_not_shared_evenly(dealt, heads):
    for use in (
        lambda: dealt.replicas(heads),
        lambda: regroup_groups(dealt, heads),
        lambda: writers_to(0, sharding(1), dealt, heads, 0, True),
    ):
        with pytest.raises(TopologyError):
            use()


@pytest.mark.parametrize("sizes", [(0,), (2, 0), (2, 2, 0), (2, 2, 16, 0), (2, -2)])
def test_sizes_below_one(sizes):
    with pytest.raises(TopologyError, match="parallel sizes"):
        sharding(*sizes)


def geometry(heads: int, total: int, *, block_size: int = 4, order: Order = Order.TOKEN_MAJOR) -> Geometry:
    return Geometry(
        group=0,
        order=order,
        dtype="uint8",
        block_size=block_size,
        block_stride=block_size * heads * 2,
        heads=heads,
        total_heads=total,
        head_bytes=2,
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_slot_holds_a_step_and_what_the_ranks_of_a_group_round_up(ranks):
    own = geometry(4 // ranks, 4)
    tensors = tuple(CacheTensor("layer", part, 0, 8, 0) for part in range(2))
    size = slot_bytes(RankCaches((own,), tensors), 20)
    assert size == (20 + (1 + ranks) * 4) * 2 * own.entry_bytes
    for decode in (1, 2, 4):
        mapping = make_mapping(own, 0, sharding(ranks), sharding(decode), 4)
        if mapping.is_staged:
            units = mapping.slot_units(size, len(tensors))
            assert units >= 20 // 4 + 1
            assert units % mapping.ratio == 0
            assert mapping.share(units)[0] * mapping.planes * mapping.staged_bytes * 2 <= size


def test_every_exchange_has_its_process_group():
    for heads, p_tp, d_tp in all_sizes():
        groups = regroup_groups(sharding(p_tp), heads)
        for rank in range(p_tp):
            mapping = make_mapping(geometry(max(1, heads // p_tp), heads), rank, sharding(p_tp), sharding(d_tp), 4)
            if mapping.ranks:
                assert mapping.ranks in groups
                assert mapping.ranks[mapping.index] == rank


def test_head_major_needs_equal_block_sizes():
    with pytest.raises(LayoutError, match="both sides need the same block size"):
        make_mapping(geometry(2, 2, block_size=4, order=Order.HEAD_MAJOR), 0, sharding(1), sharding(1), 8)


# --- context parallelism -------------------------------------------------------------------------------------


def shared(source: Geometry, dealt: Sharding, rank: int) -> Geometry:
    return msgspec.structs.replace(source, share=dealt.share(rank))


@pytest.mark.parametrize(
    ("prefill", "decode", "runs"), [(sharding(2, 2, 2), sharding(1), (2, 4)), (sharding(1), sharding(2, 2, 1), (4, 1))]
)
def test_head_major_blocks_are_dealt_out_whole(prefill, decode, runs):
    source = shared(geometry(1, 1, order=Order.HEAD_MAJOR), prefill, 0)
    with pytest.raises(LayoutError, match=rf"runs of {runs[0]} \(prefill\) and {runs[1]} \(decode\) tokens"):
        make_mapping(source, 0, prefill, decode, 4)


def test_decode_cannot_share_tokens_of_heads_that_only_one_rank_has():
    with pytest.raises(TopologyError, match="must divide evenly"):
        make_mapping(geometry(4, 4), 0, sharding(1), sharding(4, 2, 4), 4)


@pytest.mark.parametrize(
    ("heads", "prefill", "decode", "slow"),
    [
        (4, sharding(2), sharding(1), None),
        (6, sharding(3), sharding(2), None),
        (1, sharding(2, 2, 16), sharding(1), None),
        (1, sharding(2, 2, 2), sharding(2, 2, 2), None),  # neighbours merge to whole blocks
        (1, sharding(1), sharding(2, 2, 2), "it is written 2 tokens at a time"),
        (1, sharding(2, 2, 16), sharding(2, 2, 4), "it is written 4 tokens at a time"),
    ],
)
def test_what_is_right_but_slow(heads, prefill, decode, slow):
    source = shared(geometry(max(1, heads // prefill.tp), heads, block_size=16), prefill, 0)
    mapping = make_mapping(source, 0, prefill, decode, 16)
    said = why_slow(mapping, source, prefill, decode, 16)
    assert (said is None) if slow is None else (said is not None and slow in said and "correct but slow" in said)


@pytest.mark.parametrize(("start", "stop"), [(3, 4), (-2, 2), (4, 2)])
def test_units_begin_on_their_boundary(start, stop):
    with pytest.raises(ValueError, match=rf"tokens \[{start}, {stop}\) do not begin a unit of 2 tokens"):
        Units.of(2, [(0, 2), (start, stop)])


@pytest.mark.parametrize(
    ("first_block", "start", "stop", "token"),
    [(0, 0, 5, 4), (0, 4, 5, 4), (1, 0, 4, 0), (1, 0, 8, 0), (1, 4, 9, 8), (0, 0, 2**20, 4)],
)
def test_units_outside_the_blocks(first_block, start, stop, token):
    """Though a neighbour has blocks there."""
    units, others = Units.of(4, [(0, 4), (start, stop), (0, 4)]), np.array([7, 1, 3])
    with pytest.raises(ValueError, match=f"token {token} is not in 1 blocks from block {first_block} on"):
        units.blocks([others, np.array([0]), others], [0, first_block, 0], 4)


def test_a_mapping_to_a_thousand_ranks_looks_at_each_of_them_once():
    """Tickets name the shape, and the model's thread makes the mapping. It took half a second."""
    many, began = sharding(1024), time.process_time()
    mapping = make_mapping(geometry(1, 8, block_size=16), 0, sharding(8), many, 16)
    assert [target.tp_rank for target in mapping.portions] == list(range(128))
    assert time.process_time() - began < 0.1
