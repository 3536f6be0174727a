# SPDX-License-Identifier: Apache-2.0
"""Writing over TCP: what Mooncake's queue to a peer holds."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.transport.tcp import PeerQueue
from vllm_ascend_pd.transport.tcp_settings import most_descriptors
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
