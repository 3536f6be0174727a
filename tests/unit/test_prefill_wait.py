# SPDX-License-Identifier: Apache-2.0
"""The estimate of how long a prompt waits in prefill's queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.proxy.routing.load import MAX_WAIT_SECONDS, EngineLoad, PrefillPace, queue_wait


def loads(*tokens: int) -> list[EngineLoad]:
    return [EngineLoad(f"http://{number}", 1, each) for number, each in enumerate(tokens)]


@pytest.mark.parametrize(
    ("tokens", "queued", "pace", "seconds"),
    [
        ((), 0, 1000, 0.0),
        ((5000,), 0, 0, 0.0),  # the pace is unknown
        ((0,), 0, 1000, 0.0),
        ((5000,), 0, 1000, 5.0),
        ((5000, 2000, 9000), 0, 1000, 2.0),
        ((5000, 0), 0, 1000, 0.0),
        ((1000, 1000), 4000, 1000, 3.0),
        ((10**9,), 0, 1, MAX_WAIT_SECONDS),
    ],
)
def test_wait(tokens: tuple[int, ...], queued: float, pace: float, seconds: float) -> None:
    assert queue_wait(loads(*tokens), queued, pace) == pytest.approx(seconds)


@given(st.lists(st.integers(0, 10**12), max_size=4), st.floats(0, 1e12), st.floats(0, 1e9))
def test_wait_is_bounded(tokens: list[int], queued: float, pace: float) -> None:
    assert 0.0 <= queue_wait(loads(*tokens), queued, pace) <= MAX_WAIT_SECONDS


def test_pace_is_unknown_at_first() -> None:
    assert PrefillPace().tokens_per_second == 0.0


def test_pace_counts_what_was_ahead() -> None:
    """Four prompts of 1,000 tokens that an engine gets at the same time and computes one by one, a second each."""
    pace = PrefillPace()
    for number in range(1, 5):
        pace.note(1000 * number, float(number))
    assert pace.tokens_per_second == pytest.approx(1000)


def test_short_prompts_count_little() -> None:
    """Their time is mostly a fixed cost."""
    pace = PrefillPace()
    for _ in range(20):
        pace.note(8, 0.01)
        pace.note(4000, 1.0)
    assert pace.tokens_per_second == pytest.approx(4000, rel=0.05)


def test_pace_follows_the_last_prefills() -> None:
    pace = PrefillPace()
    for _ in range(300):
        pace.note(1000, 1.0)
    for _ in range(300):
        pace.note(1000, 0.1)
    assert pace.tokens_per_second == pytest.approx(10_000, rel=0.05)
