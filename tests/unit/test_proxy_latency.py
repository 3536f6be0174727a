# SPDX-License-Identifier: Apache-2.0
"""Percentiles of the last minutes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.proxy.operate.latency import MAX_SAMPLES, WINDOW_SECONDS, Percentiles, RecentSamples, percentiles

SECONDS = st.lists(st.floats(0, 1e6), min_size=1, max_size=250)


def test_nothing_yet() -> None:
    assert RecentSamples().percentiles(0.0) == Percentiles(0, None, None, None)


def test_one_to_a_hundred() -> None:
    assert percentiles([float(n) for n in range(100, 0, -1)]) == Percentiles(100, 50.0, 90.0, 99.0)


@given(SECONDS)
def test_a_percentile_is_the_smallest_sample_with_enough_samples_at_or_below_it(samples: list[float]) -> None:
    found = percentiles(samples)
    for part, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value in samples
        assert 100 * sum(sample <= value for sample in samples) >= part * len(samples)
        smaller = [sample for sample in samples if sample < value]
        assert 100 * len(smaller) < part * len(samples)


def test_old_samples_do_not_count() -> None:
    recent = RecentSamples()
    recent.add(9.0, now=0.0)
    recent.add(1.0, now=1.0)
    assert recent.percentiles(WINDOW_SECONDS).count == 2
    assert recent.percentiles(WINDOW_SECONDS + 0.5) == Percentiles(1, 1.0, 1.0, 1.0)
    assert recent.percentiles(WINDOW_SECONDS + 2.0).count == 0


def test_samples_are_bounded_and_the_newest_stay() -> None:
    recent = RecentSamples()
    for number in range(MAX_SAMPLES + 10):
        recent.add(float(number), now=0.0)
    found = recent.percentiles(0.0)
    assert (found.count, found.p50) == (MAX_SAMPLES, 9.0 + MAX_SAMPLES / 2)
