# SPDX-License-Identifier: Apache-2.0
"""What a route makes of a unit."""

import msgspec
import pytest
from simulate import all_sizes

from vllm_ascend_pd.core.layout import CacheTensor, Geometry, LayoutError, Order, RankCaches
from vllm_ascend_pd.core.plan import make_route, slot_bytes, why_slow
from vllm_ascend_pd.core.topology import Sharding, TopologyError, regroup_groups, sharding


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
        route = make_route(own, 0, sharding(ranks), sharding(decode), 4)
        if route.is_staged:
            units = route.slot_units(size, len(tensors))
            assert units >= 20 // 4 + 1
            assert units % route.ratio == 0
            assert route.share(units)[0] * route.planes * route.staged_bytes * 2 <= size


def test_every_exchange_has_its_process_group():
    for heads, p_tp, d_tp in all_sizes():
        groups = regroup_groups(sharding(p_tp), heads)
        for rank in range(p_tp):
            route = make_route(geometry(max(1, heads // p_tp), heads), rank, sharding(p_tp), sharding(d_tp), 4)
            if route.ranks:
                assert route.ranks in groups
                assert route.ranks[route.index] == rank


def test_head_major_needs_equal_block_sizes():
    with pytest.raises(LayoutError, match="both sides need the same block size"):
        make_route(geometry(2, 2, block_size=4, order=Order.HEAD_MAJOR), 0, sharding(1), sharding(1), 8)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 4), (4, 1)])
def test_sizes_that_heads_do_not_allow(p_tp, d_tp):
    with pytest.raises(TopologyError):
        make_route(geometry(6, 6), 0, sharding(p_tp), sharding(d_tp), 4)


# --- context parallelism -------------------------------------------------------------------------------------


def shared(source: Geometry, dealt: Sharding, rank: int) -> Geometry:
    return msgspec.structs.replace(source, share=dealt.share(rank))


@pytest.mark.parametrize(
    ("prefill", "decode", "runs"), [(sharding(2, 2, 2), sharding(1), (2, 4)), (sharding(1), sharding(2, 2, 1), (4, 1))]
)
def test_head_major_blocks_are_dealt_out_whole(prefill, decode, runs):
    source = shared(geometry(1, 1, order=Order.HEAD_MAJOR), prefill, 0)
    with pytest.raises(LayoutError, match=rf"runs of {runs[0]} \(prefill\) and {runs[1]} \(decode\) tokens"):
        make_route(source, 0, prefill, decode, 4)


def test_decode_cannot_share_tokens_of_heads_that_only_one_rank_has():
    with pytest.raises(TopologyError, match="must divide evenly"):
        make_route(geometry(4, 4), 0, sharding(1), sharding(4, 2, 4), 4)


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
    route = make_route(source, 0, prefill, decode, 16)
    said = why_slow(route, source, prefill, decode, 16)
    assert (said is None) if slow is None else (said is not None and slow in said and "correct but slow" in said)
