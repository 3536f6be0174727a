# SPDX-License-Identifier: Apache-2.0
"""How long a thread sleeps on a batch."""

import pytest

from harness.clock import Clock, clock_of
from vllm_ascend_pd.transport import tcp
from vllm_ascend_pd.transport.tcp import EARLIEST_S, LEARNS_FROM, LONGEST_S, SHARE, SHORTEST_S, Pace

BATCH = 16 << 20
GIGABYTE_PER_S = 1e-9


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return clock_of(tcp, monkeypatch)


def send(clock: Clock, of: Pace, num_bytes: int, seconds: float) -> float:
    """One batch that arrives after `seconds`, or after the sleep if that is longer. Returns that sleep."""
    started = clock.now
    slept = of.pause_s(num_bytes, started)
    clock.now = started + max(slept, seconds)
    of.arrived(num_bytes, started)
    return slept


def test_a_moment_is_slept_before_the_link_is_known(clock):
    of, started = Pace(), clock.now
    assert of.pause_s(BATCH, started) == pytest.approx(EARLIEST_S)
    clock.now += EARLIEST_S - SHORTEST_S / 2
    assert of.pause_s(BATCH, started) == 0.0, "too short for a sleep"


def test_most_of_what_a_batch_takes_is_slept(clock):
    of = Pace()
    for _ in range(4):
        send(clock, of, BATCH, BATCH * GIGABYTE_PER_S)
    assert of.pause_s(2 * BATCH, clock.now) == pytest.approx(SHARE * 2 * BATCH * GIGABYTE_PER_S)
    later = clock.now
    clock.now += 0.01
    assert of.pause_s(2 * BATCH, later) == pytest.approx(SHARE * 2 * BATCH * GIGABYTE_PER_S - 0.01)


def test_a_batch_behind_another_has_the_link_from_when_that_ended(clock):
    of = Pace()
    for _ in range(4):
        send(clock, of, BATCH, BATCH * GIGABYTE_PER_S)
    first, second = clock.now, clock.now
    clock.now += BATCH * GIGABYTE_PER_S
    of.arrived(BATCH, first)
    assert of.pause_s(BATCH, second) == pytest.approx(SHARE * BATCH * GIGABYTE_PER_S)
    clock.now += BATCH * GIGABYTE_PER_S
    of.arrived(BATCH, second)
    assert of.pause_s(BATCH, clock.now) == pytest.approx(SHARE * BATCH * GIGABYTE_PER_S)


def test_a_moment_is_slept_on_small_batches_which_teach_nothing(clock):
    of = Pace()
    send(clock, of, LEARNS_FROM - 1, 1.0)
    assert of.pause_s(BATCH, clock.now) == pytest.approx(EARLIEST_S)
    for _ in range(4):
        send(clock, of, BATCH, BATCH * GIGABYTE_PER_S)
    assert of.pause_s(1 << 16, clock.now) == pytest.approx(EARLIEST_S)


def test_what_is_slept_on_a_fast_link_is_not_taken_for_its_time(clock):
    of = Pace()
    for _ in range(8):
        send(clock, of, LEARNS_FROM, LEARNS_FROM * GIGABYTE_PER_S / 20)
    assert of.pause_s(16 * BATCH, clock.now) == pytest.approx(EARLIEST_S)


def test_of_a_slow_link_no_more_than_so_long_is_slept_at_a_time(clock):
    of = Pace()
    for _ in range(8):
        send(clock, of, 1 << 20, 1.0)
    assert of.pause_s(64 << 20, clock.now) == LONGEST_S


def test_a_few_stalls_are_not_slept_on(clock):
    of = Pace()
    for seconds in (0.3, 0.3, BATCH * GIGABYTE_PER_S, BATCH * GIGABYTE_PER_S, 0.3, 0.3, 0.3):
        send(clock, of, BATCH, seconds)
    assert of.pause_s(BATCH, clock.now) == pytest.approx(SHARE * BATCH * GIGABYTE_PER_S)


def test_a_link_that_has_become_faster_is_noticed(clock):
    of = Pace()
    for _ in range(20):
        send(clock, of, BATCH, 8 * BATCH * GIGABYTE_PER_S)
    for _ in range(40):
        slept = send(clock, of, BATCH, BATCH * GIGABYTE_PER_S)
    assert slept <= BATCH * GIGABYTE_PER_S


def test_that_a_link_is_faster_than_thought_is_learnt_from_small_batches_too(clock):
    small = LEARNS_FROM // 2
    of = Pace()
    for _ in range(8):
        send(clock, of, BATCH, 50 * BATCH * GIGABYTE_PER_S)
    for _ in range(60):
        slept = send(clock, of, small, small * GIGABYTE_PER_S)
    assert slept <= max(EARLIEST_S, small * GIGABYTE_PER_S)
    known = of.pause_s(BATCH, clock.now)
    for _ in range(8):
        send(clock, of, small, 50 * small * GIGABYTE_PER_S)
    assert of.pause_s(BATCH, clock.now) == pytest.approx(known), "what else they take is not the link's time"


def test_small_batches_that_arrive_together_teach_nothing(clock):
    small = LEARNS_FROM // 2
    of = Pace()
    for _ in range(8):
        send(clock, of, BATCH, BATCH * GIGABYTE_PER_S)
    known = of.pause_s(BATCH, clock.now)
    for _ in range(8):
        started = clock.now
        clock.now += 2 * small * GIGABYTE_PER_S
        of.arrived(small, started)
        of.arrived(small, started)
    assert of.pause_s(BATCH, clock.now) == pytest.approx(known)
