# SPDX-License-Identifier: Apache-2.0
"""Ranks wake decode's scheduler; whatever goes wrong with that harms neither."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from vllm_ascend_pd.transport.wakeup import WakeupSender, WakeupSocket

SHORT_S, LONG_S = 0.05, 60.0


@pytest.fixture
def doorbell() -> Iterator[WakeupSocket]:
    doorbell = WakeupSocket()
    yield doorbell
    doorbell.close()


@pytest.fixture
def ringer() -> Iterator[WakeupSender]:
    ringer = WakeupSender()
    yield ringer
    ringer.close()


def has_rung(doorbell: WakeupSocket, timeout_s: float) -> bool:
    began = time.monotonic()
    doorbell.wait(timeout_s)
    return time.monotonic() - began < 0.9 * timeout_s


def test_a_ring_is_heard_once(doorbell, ringer):
    ringer.ring(doorbell.address)
    assert has_rung(doorbell, LONG_S)
    assert not has_rung(doorbell, SHORT_S)


def test_a_silenced_one_has_not_rung(doorbell, ringer):
    ringer.ring(doorbell.address)
    doorbell.silence()
    assert not has_rung(doorbell, SHORT_S)
    doorbell.wait(0.0)
    doorbell.silence()


def test_who_rings_on_and_on_is_not_held_up(doorbell, ringer):
    for _ in range(10_000):  # more than the kernel keeps
        ringer.ring(doorbell.address)
    assert has_rung(doorbell, LONG_S)
    doorbell.silence()
    assert not has_rung(doorbell, SHORT_S)


def test_ringing_where_nobody_listens_does_no_harm(ringer):
    gone = WakeupSocket()
    gone.close()
    ringer.ring(gone.address)
    ringer.ring("")
    with closing(WakeupSocket()) as other:
        ringer.ring(other.address)
        assert has_rung(other, LONG_S)


def test_each_has_an_address_of_its_own(doorbell, ringer):
    with closing(WakeupSocket()) as other:
        ringer.ring(other.address)
        assert not has_rung(doorbell, SHORT_S)
        assert has_rung(other, LONG_S)
