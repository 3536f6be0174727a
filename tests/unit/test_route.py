# SPDX-License-Identifier: Apache-2.0
"""What a route makes of a unit, and where in memory units lie."""

import numpy as np
import pytest
from simulate import all_sizes

from vllm_ascend_pd.core.layout import Geometry, LayoutError, Order
from vllm_ascend_pd.core.plan import Regroup, Target, descriptors, make_route, staged_units, unit_offsets
from vllm_ascend_pd.core.topology import TopologyError, regroup_groups, writers_to


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
    ("heads", "p_tp", "d_tp", "order", "regroup", "planes", "ranks"),
    [
        (4, 2, 2, Order.TOKEN_MAJOR, Regroup.NONE, 1, ()),
        (4, 4, 2, Order.TOKEN_MAJOR, Regroup.GATHER, 1, (0, 1)),
        (4, 4, 1, Order.TOKEN_MAJOR, Regroup.GATHER, 1, (0, 1, 2, 3)),
        (2, 4, 1, Order.TOKEN_MAJOR, Regroup.GATHER, 1, (0, 2)),
        (4, 2, 4, Order.TOKEN_MAJOR, Regroup.SPLIT, 2, ()),
        (4, 2, 8, Order.TOKEN_MAJOR, Regroup.SPLIT, 2, ()),
        (6, 3, 2, Order.TOKEN_MAJOR, Regroup.NONE, 1, ()),
        (8, 8, 1, Order.TOKEN_MAJOR, Regroup.NONE, 1, ()),  # 8 slices of a block of 4 tokens: none
        (1, 4, 2, Order.TOKEN_MAJOR, Regroup.NONE, 1, ()),
        (4, 4, 2, Order.HEAD_MAJOR, Regroup.NONE, 1, ()),
        (4, 2, 4, Order.HEAD_MAJOR, Regroup.NONE, 1, ()),
    ],
)
def test_what_rank_0_does(heads, p_tp, d_tp, order, regroup, planes, ranks):
    route = make_route(geometry(max(1, heads // p_tp), heads, order=order), 0, p_tp, d_tp, 4)
    assert (route.regroup, route.planes, route.ranks) == (regroup, planes, ranks)


@pytest.mark.parametrize("order", Order)
def test_equal_heads_travel_as_whole_units(order):
    assert make_route(geometry(2, 4, order=order), 1, 2, 2, 4).targets == (Target(tp_rank=1, nbytes=16),)


def test_every_exchange_has_its_process_group():
    for heads, p_tp, d_tp in all_sizes():
        groups = regroup_groups(p_tp, heads)
        for rank in range(p_tp):
            # Blocks of 840 tokens: every ratio up to 8 divides them, so every exchange that can be, is.
            own = geometry(max(1, heads // p_tp), heads, block_size=840)
            route = make_route(own, rank, p_tp, d_tp, 840)
            if route.regroup is Regroup.GATHER:
                assert route.ranks in groups
                assert route.ranks[route.index] == rank


def test_writers_are_those_whose_routes_lead_to_the_rank():
    for heads, p_tp, d_tp in all_sizes():
        for order in Order:
            own = geometry(max(1, heads // p_tp), heads, order=order)
            routes = [make_route(own, rank, p_tp, d_tp, 4) for rank in range(p_tp)]
            for salt in range(p_tp + 1):
                for d_rank in range(d_tp):
                    lead_there = tuple(
                        rank
                        for rank, route in enumerate(routes)
                        if route.serves(salt) and any(t.tp_rank == d_rank for t in route.targets)
                    )
                    assert writers_to(d_rank, d_tp, p_tp, heads, salt) == lead_there


def test_replicas_share_the_requests():
    routes = [make_route(geometry(1, 2), rank, 8, 1, 4) for rank in range(8)]
    served = [[salt for salt in range(8) if route.serves(salt)] for route in routes]
    assert served == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2


def test_head_major_needs_equal_block_sizes():
    with pytest.raises(LayoutError, match="both sides need the same block size"):
        make_route(geometry(2, 2, block_size=4, order=Order.HEAD_MAJOR), 0, 1, 1, 8)


@pytest.mark.parametrize(("p_block", "d_block"), [(4, 6), (6, 4)])
def test_block_sizes_must_be_multiples(p_block, d_block):
    with pytest.raises(LayoutError, match="one must be a multiple of the other"):
        make_route(geometry(2, 2, block_size=p_block), 0, 1, 1, d_block)


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 4), (4, 1)])
def test_sizes_that_heads_do_not_allow(p_tp, d_tp):
    with pytest.raises(TopologyError):
        make_route(geometry(6, 6), 0, p_tp, d_tp, 4)


# --- offsets -------------------------------------------------------------------------------------------------

STRIDED = Geometry(
    group=0,
    order=Order.TOKEN_MAJOR,
    dtype="uint8",
    block_size=4,
    block_stride=100,
    heads=2,
    total_heads=2,
    head_bytes=10,
)


@pytest.mark.parametrize(
    ("first_block", "unit", "start", "stop", "expected"),
    [
        (0, 4, 0, 12, [700, 100, 300]),
        (0, 4, 4, 12, [100, 300]),
        (0, 4, 4, 5, [100]),
        (0, 4, 8, 8, []),
        (5, 4, 20, 32, [700, 100, 300]),
        (0, 2, 0, 8, [700, 740, 100, 140]),
        (0, 2, 2, 7, [740, 100, 140]),
        (5, 2, 22, 25, [740, 100]),
    ],
)
def test_unit_offsets(first_block, unit, start, stop, expected):
    blocks = np.array([7, 1, 3])
    assert unit_offsets(blocks, first_block, STRIDED, unit, start, stop).tolist() == expected


def test_units_begin_on_their_boundary():
    with pytest.raises(ValueError, match="token 3 is not on the boundary of a unit of 2 tokens"):
        unit_offsets(np.array([0]), 0, STRIDED, 2, 3, 4)


@pytest.mark.parametrize(
    ("first_block", "start", "stop"),
    [(0, 0, 5), (0, 4, 5), (1, 0, 4), (1, 0, 8), (1, 4, 9), (0, -4, 4), (0, 4, 0), (0, 0, 2**40)],
)
def test_units_outside_the_blocks(first_block, start, stop):
    with pytest.raises(ValueError, match=rf"tokens \[{start}, {stop}\) are not all in 1 blocks from block"):
        unit_offsets(np.array([0]), first_block, STRIDED, 4, start, stop)


def test_strided_target():
    target = Target(0, nbytes=3, src_offset=1, dst_offset=2, rows=2, src_pitch=10, dst_pitch=20)
    copies = descriptors(target, np.array([0, 100]), np.array([500, 1000]))
    assert copies.src.tolist() == [1, 11, 101, 111]
    assert copies.dst.tolist() == [502, 522, 1002, 1022]
    assert copies.nbytes.tolist() == [3, 3, 3, 3]


def test_staged_units_of_a_plane():
    route = make_route(geometry(2, 2), 0, 1, 2, 4)
    assert (route.staged_bytes, route.planes) == (8, 2)
    assert staged_units(route, 1, capacity=5, count=2).tolist() == [40, 48]
