# SPDX-License-Identifier: Apache-2.0
"""The limit of open files is shared so that no kind of connection runs out of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.proxy.server import Capacity, capacity, files_for


def test_the_defaults_fit_what_they_want() -> None:
    assert files_for(1024, 32768) == 45_312
    assert capacity(45_312, 1024, 32768) == Capacity(1024, 32768, 36_864, 4096)


def test_few_open_files_are_shared_between_served_and_waiting_requests() -> None:
    assert capacity(1024, 1024, 32768) == Capacity(128, 128, 384, 128)


def test_the_queue_shrinks_before_the_number_of_served_requests() -> None:
    assert capacity(20_000, 3024, 32768)[:2] == (3024, 5148)


@given(st.integers(600, 100_000), st.integers(1, 10_000), st.integers(0, 100_000))
def test_connections_never_need_more_files_than_there_are(files: int, concurrent: int, waiting: int) -> None:
    found = capacity(files, concurrent, waiting)
    assert 1 <= found.concurrent <= concurrent
    assert 0 <= found.waiting <= waiting
    # Beside the line, a request that is served has room for its client and its tickets.
    assert found.connections - found.waiting >= 2 * found.concurrent
    assert found.connections + 2 * found.concurrent + found.backlog <= files


@given(st.integers(1, 10_000), st.integers(0, 100_000))
def test_files_that_are_wanted_are_enough(concurrent: int, waiting: int) -> None:
    found = capacity(files_for(concurrent, waiting), concurrent, waiting)
    assert (found.concurrent, found.waiting) == (concurrent, waiting)
