# SPDX-License-Identifier: Apache-2.0
"""Slots of the staging ring: free, held, or at rest after a failed write."""

import pytest
import torch

from vllm_ascend_pd.prefill.staging import StagingRing


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ring(clock: Clock) -> StagingRing[str]:
    return StagingRing(torch.zeros(2 * 64, dtype=torch.uint8), 64, 2, clock)  # type: ignore[arg-type]


def test_a_slot_at_rest_is_nobodys_until_its_time(ring: StagingRing[str], clock: Clock) -> None:
    a, b = ring.take("a"), ring.take("b")
    assert a is not None
    assert b is not None
    ring.release(a, settled_at=108.0)
    assert ring.holders == ["b"]
    assert ring.rests()
    assert ring.take("c") is None
    clock.now = 107.9
    assert ring.take("c") is None
    clock.now = 108.0
    assert ring.take("c") == a
    assert not ring.rests()
