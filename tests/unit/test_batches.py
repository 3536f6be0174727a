# SPDX-License-Identifier: Apache-2.0
"""Batches copy the same bytes as what they were cut from, within the limits, wherever the tensors begin."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.core.plan import Descriptors
from vllm_ascend_pd.transport.batches import PagedWrite, TransferLimits
from vllm_ascend_pd.transport.engine import TransferEngine

Copy = tuple[int, int, int]  # source, destination, bytes


def descriptors(copies: list[Copy]) -> Descriptors:
    columns = np.array(copies, dtype=np.int64).reshape(len(copies), 3).T
    return Descriptors(*columns)


def touched(copies: list[Copy]) -> list[tuple[int, int]]:
    """(from, to) of every byte, in order."""
    return [(src + i, dst + i) for src, dst, nbytes in copies for i in range(nbytes)]


KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ([400 * KIB, 400 * KIB], 4 * [200 * KIB]),
        ([600 * KIB, 200 * KIB], 4 * [200 * KIB]),
        ([802 * KIB], [204 * KIB, 204 * KIB, 204 * KIB, 190 * KIB]),  # in whole pages
        ([400 * KIB], 4 * [100 * KIB]),
        ([300 * KIB], 3 * [100 * KIB]),  # no fewer bytes than take about as long as a descriptor costs
        ([100 * KIB, 100 * KIB], [100 * KIB, 100 * KIB]),
        (16 * [256 * KIB], 16 * [256 * KIB]),
        ([MIB, 12 * MIB], 52 * [256 * KIB]),  # and no longer than are best over TCP
        (3 * [320 * KIB], 6 * [160 * KIB]),
    ],
)
def test_few_descriptors_become_one_for_each_connection(sizes: list[int], cut: list[int]) -> None:
    copies = descriptors([(i << 30, i << 30, size) for i, size in enumerate(sizes)])
    [(_, _, lengths)] = PagedWrite([copies], TransferLimits(connections=4), []).at([([0], [0])])
    assert lengths == cut
    uncut = PagedWrite([copies], TransferLimits(connections=1, max_descriptor_bytes=16 * MIB), [])
    [(_, _, lengths)] = uncut.at([([0], [0])])
    assert lengths == sizes, "where a descriptor is not one connection's"


def test_limits_suit_the_protocol() -> None:
    assert TransferLimits.over("tcp") == TransferLimits()
    ascend = TransferLimits.over("ascend", timeout_s=3.0)
    assert (ascend.max_descriptors, ascend.max_bytes, ascend.timeout_s) == (8192, 1024 * MIB, 3.0)
    assert ascend.piece_bytes(64 * MIB) == 1024 * MIB, "descriptors are not cut"


COPIES = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 40)), max_size=12)
BASE = st.integers(0, (1 << 62) - 1)


@given(
    st.lists(st.tuples(COPIES, BASE, BASE), max_size=4),
    st.builds(
        TransferLimits,
        max_descriptors=st.integers(1, 6),
        max_bytes=st.integers(1, 60),
        max_descriptor_bytes=st.integers(1, 50),
    ),
)
def test_the_same_bytes_within_the_limits(parts: list[tuple[list[Copy], int, int]], limits: TransferLimits) -> None:
    write = PagedWrite([descriptors(copies) for copies, _, _ in parts], limits, [])
    batches = list(write.at([([src for _, src, _ in parts], [dst for _, _, dst in parts])]))

    wanted = [
        (src_base + src, dst_base + dst, nbytes) for copies, src_base, dst_base in parts for src, dst, nbytes in copies
    ]
    found = [copy for batch in batches for copy in zip(*batch, strict=True)]
    assert touched(found) == touched(wanted)
    for batch in batches:
        assert all(type(number) is int for column in batch for number in column)  # which Mooncake's binding wants
        assert 1 <= len(batch[2]) <= limits.max_descriptors
        assert sum(batch[2]) <= limits.max_bytes
        assert max(batch[2]) <= limits.max_descriptor_bytes
    for one, next_one in pairwise(batches):  # each as full as it can be
        assert len(one[2]) == limits.max_descriptors or sum(one[2]) + next_one[2][0] > limits.max_bytes


@pytest.mark.parametrize("batch", [([], [], []), ([1], [2], [0])], ids=["no descriptors", "no bytes"])
def test_a_batch_without_bytes_is_not_begun(batch: tuple[list[int], list[int], list[int]]) -> None:
    """Mooncake may end the process when it is asked for the status of such a batch."""
    engine = TransferEngine.__new__(TransferEngine)
    with pytest.raises(ValueError, match="a batch without bytes"):
        engine.begin("peer", batch, lambda: True)
