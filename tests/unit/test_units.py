# SPDX-License-Identifier: Apache-2.0
"""Which units requests have, and where in memory they lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.layout import Geometry, Order
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
