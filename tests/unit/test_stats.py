# SPDX-License-Identifier: Apache-2.0
"""What ranks count adds up, whatever is merged first: nothing is lost, nothing grows."""

import math
import pickle
from bisect import bisect_left
from collections import Counter as Tally
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.observe.stats import (
    DECODE_METRICS,
    GRANTS_WAITING,
    LAYER_PUSH_SECONDS,
    OVERLAP_RATIO,
    PREFILL_METRICS,
    PUSH_FAILURES,
    PUSH_QUEUE_DEPTH,
    PUSHED_BYTES,
    WRITE_RETRIES,
    Counter,
    Data,
    Histogram,
    Stats,
    merged,
    observations,
)

HISTOGRAMS = [m for m in (*PREFILL_METRICS, *DECODE_METRICS) if isinstance(m, Histogram)]
# Sums of these have no rounding, in whatever order: as many binary places as all of them together have.
_exact = st.integers(0, 1 << 20).map(lambda n: n / 1024)
_records = st.one_of(
    st.tuples(st.just(PUSHED_BYTES), st.just(""), st.integers(0, 1 << 50)),
    st.tuples(st.just(PUSH_FAILURES), st.sampled_from(PUSH_FAILURES.reasons), st.integers(0, 5)),
    st.tuples(st.sampled_from([LAYER_PUSH_SECONDS, OVERLAP_RATIO]), st.just(""), _exact),
)
_ranks = st.sampled_from(["0/0", "0/1", "1/0"])
_gauges = st.dictionaries(st.sampled_from([PUSH_QUEUE_DEPTH, GRANTS_WAITING]), st.integers(0, 9))
_steps = st.lists(st.tuples(_ranks, st.lists(_records, max_size=6), _gauges), max_size=8)


def taken(steps: Any) -> list[Data]:
    """What ranks say, step by step."""
    ranks = {rank: Stats(rank) for rank, _, _ in steps}
    said = []
    for rank, records, gauges in steps:
        for metric, reason, value in records:
            ranks[rank].add(metric, value, reason)
        said.append(ranks[rank].take(lambda gauges=gauges: gauges))
    return said


@given(_steps)
def test_nothing_is_lost(steps: Any) -> None:
    whole = reduce(merged, taken(steps), {})
    sums: Tally[tuple[str, str]] = Tally()
    counts: Tally[str] = Tally()
    totals: Tally[str] = Tally()
    last: dict[tuple[str, str], int] = {}
    for rank, records, gauges in steps:
        for metric, reason, value in records:
            if isinstance(metric, Counter):
                sums[metric.name, reason] += value
            else:
                counts[metric.name] += 1
                totals[metric.name] += value
        last |= {(gauge.name, rank): value for gauge, value in gauges.items()}
    said = {(name, reason): n for name, of in whole.get("counters", {}).items() for reason, n in of.items()}
    assert {key: n for key, n in said.items() if n} == +sums
    histograms = whole.get("histograms", {})
    assert {name: sum(of[0]) for name, of in histograms.items()} == counts
    assert {name: sum(of[1]) for name, of in histograms.items()} == {name: totals[name] for name in counts}
    gauges = {(name, rank): n for name, of in whole.get("gauges", {}).items() for rank, n in of.items()}
    assert {key: n for key, n in gauges.items() if n} == {key: n for key, n in last.items() if n}


@given(st.sampled_from(HISTOGRAMS), st.lists(st.floats(0, 1e4), max_size=200))
def test_single_values_make_the_same_histogram(histogram: Histogram, values: list[float]) -> None:
    """Also of values just at a bucket's edge, whose mean may round over it."""
    stats = Stats()
    edges = [math.nextafter(edge, 0.0) for edge in histogram.bounds]
    values += [*histogram.bounds, *edges] * 3
    for value in values:
        stats.add(histogram, value)
    counts, sums = stats.take()["histograms"][histogram.name]
    replayed = [0] * len(counts)
    total = 0.0
    for value, count in observations(histogram, counts, sums):
        replayed[bisect_left(histogram.bounds, value)] += count
        total += value * count
    assert replayed == counts
    assert sum(counts) == len(values)
    assert total == pytest.approx(math.fsum(values), rel=1e-9)


def test_the_size_does_not_depend_on_how_much_was_recorded() -> None:
    def size(times: int) -> int:
        stats = Stats("0/0")
        for i in range(times):
            for metric in (*PREFILL_METRICS, *DECODE_METRICS):
                if isinstance(metric, Counter):
                    for reason in metric.reasons:
                        stats.add(metric, 1, reason)
                elif isinstance(metric, Histogram):
                    for bound in (*metric.bounds, 1e6):
                        stats.add(metric, bound)
            assert i < times
        return len(pickle.dumps(stats.take(lambda: {PUSH_QUEUE_DEPTH: times, GRANTS_WAITING: times})))

    once = size(1)
    assert once < 8192
    assert size(300) < 1.2 * once  # the numbers have more digits


def test_gauges_are_told_when_they_change() -> None:
    stats = Stats("0/3")
    assert stats.take(lambda: {PUSH_QUEUE_DEPTH: 0}) == {}, "0 is where they begin"
    assert stats.take(lambda: {PUSH_QUEUE_DEPTH: 2}) == {"gauges": {PUSH_QUEUE_DEPTH.name: {"0/3": 2}}}
    assert stats.take(lambda: {PUSH_QUEUE_DEPTH: 2}) == {}
    assert stats.take(lambda: {PUSH_QUEUE_DEPTH: 0}) == {"gauges": {PUSH_QUEUE_DEPTH.name: {"0/3": 0}}}


def test_a_reason_that_is_none_of_the_fixed_ones_is_refused() -> None:
    with pytest.raises(ValueError, match="push_failures has no reason 'what a peer said'"):
        Stats().add(PUSH_FAILURES, reason="what a peer said")
    with pytest.raises(ValueError, match="no reason"):
        Stats().add(WRITE_RETRIES, reason="write")
