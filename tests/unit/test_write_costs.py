# SPDX-License-Identifier: Apache-2.0
"""What descriptors take by HIXL's table."""

import pytest

from vllm_ascend_pd.tools.write_costs import HIXL, KIB

HCCS = next(each for each in HIXL if str(each) == "A3, HCCS, two machines, comm")
A2 = next(each for each in HIXL if str(each) == "A2, RoCE, one machine, comm")


def test_measured_sizes_take_what_was_measured() -> None:
    for costs in HIXL:
        for n, rate in enumerate(costs.rates):
            size = (16 << n) * KIB
            assert costs.seconds(size) == pytest.approx(size / rate / 1e9)


def test_sizes_between_and_beyond() -> None:
    assert HCCS.seconds(1) == HCCS.seconds(16 * KIB)
    assert HCCS.seconds(48 * KIB) == pytest.approx((HCCS.seconds(32 * KIB) + HCCS.seconds(64 * KIB)) / 2)
    assert A2.seconds(129 * KIB) == A2.seconds(128 * KIB), "the longest measured one is not limited by the link"
    assert A2.seconds(64 * 1024 * KIB) == pytest.approx(64 * 1024 * KIB / 23.7e9)
