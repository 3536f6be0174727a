# SPDX-License-Identifier: Apache-2.0
"""Slots of the staging ring: free, held, or at rest after a failed write."""

import threading
import time

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


def test_slots_do_not_overlap_and_come_back_in_any_order(ring: StagingRing[str]) -> None:
    a, b = ring.take("a"), ring.take("b")
    assert a is not None
    assert b is not None
    assert {a.address, b.address} == {ring.buffer.data_ptr(), ring.buffer.data_ptr() + 64}
    assert ring.take("c") is None
    ring.release(a)
    assert ring.holders == ["b"]
    assert ring.take("c") == a


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


def test_who_waits_gets_a_slot_that_has_rested(ring: StagingRing[str], clock: Clock) -> None:
    for holder in ("a", "b"):
        slot = ring.take(holder)
        assert slot is not None
        ring.release(slot, settled_at=108.0)
    with pytest.raises(TimeoutError, match=r"no staging slot became free in 0\.1 s"):
        ring.acquire("c", 0.1)
    threading.Timer(0.2, setattr, (clock, "now", 108.0)).start()
    began = time.monotonic()
    ring.acquire("c", 30.0)
    assert time.monotonic() - began < 10.0
    assert ring.holders == ["c"]


def test_who_waits_gets_a_slot_that_is_released(ring: StagingRing[str]) -> None:
    a = ring.take("a")
    assert a is not None
    ring.take("b")
    threading.Timer(0.1, ring.release, (a,)).start()
    assert ring.acquire("c", 30.0) == a
