# SPDX-License-Identifier: Apache-2.0
"""Batches to one peer never hold more of Mooncake's queue than it takes."""

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.transport.tcp import PeerQueue, most_descriptors
from vllm_ascend_pd.transport.writer import BATCHES_IN_FLIGHT


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


def test_what_failed_batches_left_is_gone_after_settling() -> None:
    queue = PeerQueue(4, settle_s=0.3)
    started = time.monotonic()
    assert queue.enter(4, 0)
    queue.leave(4, failed=True)
    assert not queue.enter(1, 0.05)
    assert queue.enter(4, 30)
    assert time.monotonic() - started >= 0.3


def test_batch_that_ends_lets_a_waiting_one_begin() -> None:
    queue = PeerQueue(100, settle_s=3600)
    for _ in range(BATCHES_IN_FLIGHT):
        assert queue.enter(1, 0)
    entered = threading.Event()
    waiting = threading.Thread(target=lambda: queue.enter(1, 30) and entered.set())
    waiting.start()
    assert not entered.wait(0.05)
    queue.leave(1, failed=False)
    assert entered.wait(30)
    waiting.join()
