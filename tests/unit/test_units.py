# SPDX-License-Identifier: Apache-2.0
"""Which units requests have, and where in memory they lie."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.layout import Geometry, Order, TokenShare
from vllm_ascend_pd.core.plan import Units

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
BLOCKS = np.array([7, 1, 3])


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
def test_offsets_of_one_request(first_block, unit, start, stop, expected):
    units = Units.of(unit, [(start, stop)])
    assert units.offsets(units.blocks([BLOCKS], [first_block], 4), STRIDED).tolist() == expected


@pytest.mark.parametrize(
    ("share", "unit", "start", "stop", "expected"),
    [
        # Blocks of 4 tokens on each of 2 ranks: token 8 is the first that block 1 stands for.
        (TokenShare(2, 0, 4), 4, 0, 24, [700, 100, 300]),
        (TokenShare(2, 1, 4), 4, 0, 24, [700, 100, 300]),
        (TokenShare(2, 0, 2), 2, 0, 16, [700, 740, 100, 140]),
        (TokenShare(2, 1, 2), 2, 0, 16, [700, 740, 100, 140]),
        (TokenShare(2, 1, 2), 1, 2, 12, [700, 720, 740, 760, 100, 120]),
        (TokenShare(2, 1, 4), 4, 0, 3, []),
        (TokenShare(2, 1, 2), 2, 14, 16, [140]),
    ],
)
def test_units_of_a_share(share, unit, start, stop, expected):
    source = msgspec.structs.replace(STRIDED, share=share)
    units = Units.of(unit, [(start, stop)])
    held = units.cut(units.held(share))
    assert held.offsets(held.blocks([BLOCKS], [0], source.span), source).tolist() == expected


def test_requests_follow_each_other():
    units = Units.of(2, [(0, 5), (6, 6), (4, 8), (0, 1)])
    assert units.tokens.tolist() == [0, 2, 4, 4, 6, 0]
    assert units.owner.tolist() == [0, 0, 0, 2, 2, 3]
    blocks = units.blocks([np.array([5, 6]), np.array([], dtype=np.int64), np.array([8]), BLOCKS], [0, 1, 1, 0], 4)
    assert blocks.tolist() == [5, 5, 6, 8, 8, 7]
    some = units.cut(np.array([False, True, True, False, False, True]))
    assert (some.tokens.tolist(), some.owner.tolist(), len(some)) == ([2, 4, 0], [0, 0, 3], 3)


def test_no_requests():
    units = Units.of(2, [])
    assert len(units) == 0
    assert units.blocks([], [], 4).tolist() == []


@given(st.data(), st.sampled_from([1, 2, 4]))
def test_many_requests_are_each_of_them(data, unit):
    """Neighbours change nothing: a request's blocks are never another's."""
    requests = []
    for _ in range(data.draw(st.integers(1, 4))):
        ids = np.array(data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)))
        first = data.draw(st.integers(0, 3))
        start = first * 4 + unit * data.draw(st.integers(0, len(ids) * 4 // unit))
        requests.append((ids, first, (start, data.draw(st.integers(start, (first + len(ids)) * 4)))))
    units = Units.of(unit, [tokens for _, _, tokens in requests])
    found = units.offsets(
        units.blocks([ids for ids, _, _ in requests], [first for _, first, _ in requests], 4), STRIDED
    )
    expected = [
        (i, int(ids[token // 4 - first]) * 100 + token % 4 * 20)
        for i, (ids, first, (start, stop)) in enumerate(requests)
        for token in range(start, stop, unit)
    ]
    assert list(zip(units.owner.tolist(), found.tolist(), strict=True)) == expected


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
    units = Units.of(4, [(0, 4), (start, stop), (0, 4)])
    with pytest.raises(ValueError, match=f"token {token} is not in 1 blocks from block {first_block} on"):
        units.blocks([BLOCKS, np.array([0]), BLOCKS], [0, first_block, 0], 4)
