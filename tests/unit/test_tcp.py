# SPDX-License-Identifier: Apache-2.0
"""Writing over TCP: how long a thread sleeps on a batch, and what Mooncake's queue to a peer holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clock import Clock, clock_of
from vllm_ascend_pd.transport import tcp
from vllm_ascend_pd.transport.tcp import EARLIEST_S, LONGEST_S, SHARE, SHORTEST_S, Pace, PeerQueue
from vllm_ascend_pd.transport.tcp_settings import most_descriptors
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT

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
    of.learn(num_bytes, started)
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


def test_of_a_slow_link_no_more_than_so_long_is_slept_at_a_time(clock):
    of = Pace()
    for _ in range(8):
        send(clock, of, 1 << 20, 1.0)
    assert of.pause_s(64 << 20, clock.now) == LONGEST_S


def test_a_link_that_has_become_faster_is_noticed(clock):
    of = Pace()
    for _ in range(20):
        send(clock, of, BATCH, 8 * BATCH * GIGABYTE_PER_S)
    for _ in range(40):
        slept = send(clock, of, BATCH, BATCH * GIGABYTE_PER_S)
    assert slept <= BATCH * GIGABYTE_PER_S


# --- Mooncake's queue to a peer ----------------------------------------------------------------------------------


@given(capacity=st.integers(1, 1 << 17))
def test_batches_that_run_and_as_many_that_failed_fit(capacity: int) -> None:
    size = most_descriptors(capacity)
    assert size == 1 or 2 * BATCHES_IN_FLIGHT * size <= capacity


@given(
    capacity=st.integers(4, 40),
    steps=st.lists(st.tuples(st.integers(1, 10), st.sampled_from(["enter", "arrives", "fails"])), max_size=30),
)
def test_never_more_than_the_capacity(capacity: int, steps: list[tuple[int, str]]) -> None:
    queue = PeerQueue(capacity, settle_s=3600)
    running: list[int] = []
    left = 0
    for size, step in steps:
        if step == "enter":
            fits = len(running) < BATCHES_IN_FLIGHT and sum(running) + left + size <= capacity
            assert queue.enter(size, timeout_s=0) == fits
            running += [size] * fits
        elif running:
            size = running.pop()
            queue.leave(size, failed=step == "fails")
            left += size * (step == "fails")
