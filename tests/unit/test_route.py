# SPDX-License-Identifier: Apache-2.0
"""What a route makes of a unit."""

import msgspec
import pytest
from simulate import all_sizes

from vllm_ascend_pd.core.layout import CacheTensor, Geometry, LayoutError, Order, RankCaches
from vllm_ascend_pd.core.plan import Target, make_route, slot_bytes, why_slow
from vllm_ascend_pd.core.topology import Sharding, TopologyError, regroup_groups, sharding, writers_to


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


@pytest.mark.parametrize(
    ("heads", "p_tp", "d_tp", "order", "planes", "ranks"),
    [
        (4, 2, 2, Order.TOKEN_MAJOR, 0, ()),
        (4, 4, 2, Order.TOKEN_MAJOR, 1, (0, 1)),
        (4, 4, 1, Order.TOKEN_MAJOR, 1, (0, 1, 2, 3)),
        (2, 4, 1, Order.TOKEN_MAJOR, 1, (0, 2)),
        (4, 2, 4, Order.TOKEN_MAJOR, 2, ()),
        (4, 2, 8, Order.TOKEN_MAJOR, 2, ()),
        (6, 3, 2, Order.TOKEN_MAJOR, 2, (0, 1, 2)),
        (6, 2, 3, Order.TOKEN_MAJOR, 3, (0, 1)),
        (8, 8, 1, Order.TOKEN_MAJOR, 1, tuple(range(8))),
        (1, 4, 2, Order.TOKEN_MAJOR, 0, ()),
        (4, 4, 2, Order.HEAD_MAJOR, 0, ()),
        (4, 2, 4, Order.HEAD_MAJOR, 0, ()),
    ],
)
def test_what_rank_0_does(heads, p_tp, d_tp, order, planes, ranks):
    route = make_route(geometry(max(1, heads // p_tp), heads, order=order), 0, sharding(p_tp), sharding(d_tp), 4)
    assert (route.planes, route.ranks) == (planes, ranks)


@pytest.mark.parametrize(("count", "shares"), [(8, [4, 4]), (5, [3, 2]), (1, [1, 0]), (0, [0, 0])])
def test_ranks_of_a_group_share_whole_units(count, shares):
    routes = [make_route(geometry(2, 4), rank, sharding(2), sharding(1), 4) for rank in range(2)]
    given = [range(count)[route.share(count)[1]] for route in routes]
    assert [unit for share in given for unit in share] == [*range(count)], "in order, each once"
    assert [len(share) for share in given] == shares
    assert {route.share(count)[0] for route in routes} == {shares[0]}
    assert [target for route in routes for target in route.targets] == [Target(tp_rank=0, nbytes=32)] * 2


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


@pytest.mark.parametrize("order", Order)
def test_equal_heads_travel_as_whole_units(order):
    route = make_route(geometry(2, 4, order=order), 1, sharding(2), sharding(2), 4)
    assert route.targets == (Target(tp_rank=1, nbytes=16),)


def test_every_exchange_has_its_process_group():
    for heads, p_tp, d_tp in all_sizes():
        groups = regroup_groups(sharding(p_tp), heads)
        for rank in range(p_tp):
            route = make_route(geometry(max(1, heads // p_tp), heads), rank, sharding(p_tp), sharding(d_tp), 4)
            if route.ranks:
                assert route.ranks in groups
                assert route.ranks[route.index] == rank


def test_writers_are_those_whose_routes_lead_to_the_rank():
    for heads, p_tp, d_tp in all_sizes():
        for order in Order:
            own = geometry(max(1, heads // p_tp), heads, order=order)
            routes = [make_route(own, rank, sharding(p_tp), sharding(d_tp), 4) for rank in range(p_tp)]
            for replica_hash in range(p_tp + 1):
                for d_rank in range(d_tp):
                    lead_there = tuple(
                        rank
                        for rank, route in enumerate(routes)
                        if route.serves(replica_hash) and any(t.tp_rank == d_rank for t in route.targets)
                    )
                    exchange = order is Order.TOKEN_MAJOR
                    assert (
                        writers_to(d_rank, sharding(d_tp), sharding(p_tp), heads, replica_hash, exchange) == lead_there
                    )


def test_replicas_share_the_requests_or_the_decode_ranks():
    routes = [make_route(geometry(1, 2), rank, sharding(8), sharding(1), 4) for rank in range(8)]
    served = [[replica_hash for replica_hash in range(8) if route.serves(replica_hash)] for route in routes]
    assert served == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    # 8 replicas of one head, and 2 on decode: those of even and those of odd numbers take turns.
    routes = [make_route(geometry(1, 1), rank, sharding(8), sharding(2), 4) for rank in range(8)]
    assert [[target.tp_rank for target in route.targets] for route in routes] == [[0], [1]] * 4
    assert [(route.replica_index, route.replicas) for route in routes] == [(rank // 2, 4) for rank in range(8)]


def test_head_major_needs_equal_block_sizes():
    with pytest.raises(LayoutError, match="both sides need the same block size"):
        make_route(geometry(2, 2, block_size=4, order=Order.HEAD_MAJOR), 0, sharding(1), sharding(1), 8)


@pytest.mark.parametrize(
    ("p_block", "d_block", "unit"), [(4, 4, 4), (4, 8, 4), (8, 4, 4), (4, 6, 2), (6, 4, 2), (4, 9, 1)]
)
def test_a_unit_lies_in_one_block_on_either_side(p_block, d_block, unit):
    assert make_route(geometry(2, 2, block_size=p_block), 0, sharding(1), sharding(1), d_block).unit == unit


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 4), (4, 1)])
def test_sizes_that_heads_do_not_allow(p_tp, d_tp):
    with pytest.raises(TopologyError):
        make_route(geometry(6, 6), 0, sharding(p_tp), sharding(d_tp), 4)


# --- context parallelism -------------------------------------------------------------------------------------


def shared(source: Geometry, dealt: Sharding, rank: int) -> Geometry:
    return msgspec.structs.replace(source, share=dealt.share(rank))


@pytest.mark.parametrize(
    ("prefill", "decode", "unit"),
    [
        (sharding(1), sharding(2, 2, 16), 16),
        (sharding(2, 2, 16), sharding(1), 16),
        (sharding(2, 2, 4), sharding(2, 2, 16), 4),
        (sharding(2, 2, 1), sharding(1), 1),
        (sharding(3, 3, 8), sharding(2, 2, 4), 4),
    ],
)
def test_a_unit_lies_with_one_rank_on_either_side(prefill, decode, unit):
    for rank in range(prefill.tp):
        source = shared(geometry(1, 1, block_size=16), prefill, rank)
        assert make_route(source, rank, prefill, decode, 16).unit == unit


def test_what_has_no_token_in_common_is_not_written_to():
    both = sharding(2, 2, 16)
    for rank in range(2):
        route = make_route(shared(geometry(1, 1, block_size=16), both, rank), rank, both, both, 16)
        assert [target.tp_rank for target in route.targets] == [rank]


@pytest.mark.parametrize(
    ("prefill", "decode", "runs"), [(sharding(2, 2, 2), sharding(1), (2, 4)), (sharding(1), sharding(2, 2, 1), (4, 1))]
)
def test_head_major_blocks_are_dealt_out_whole(prefill, decode, runs):
    source = shared(geometry(1, 1, order=Order.HEAD_MAJOR), prefill, 0)
    with pytest.raises(LayoutError, match=rf"runs of {runs[0]} \(prefill\) and {runs[1]} \(decode\) tokens"):
        make_route(source, 0, prefill, decode, 4)


def test_blocks_that_do_not_divide_are_right_but_slow():
    source = geometry(1, 1, block_size=24)
    route = make_route(source, 0, sharding(1), sharding(1), 16)
    said = why_slow(route, source, sharding(1), sharding(1), 16)
    assert said is not None
    assert said.startswith("KV lies in runs of 24 (prefill) and 16 (decode) tokens: it is written 8 tokens at a time")


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
