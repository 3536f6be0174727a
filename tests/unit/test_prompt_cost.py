# SPDX-License-Identifier: Apache-2.0
"""What prompts cost, as measured: lines through samples, times of steps, and a budget of seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.decode.who_computes import CostLine, StepTimes, TimeBudget

SAMPLES = st.lists(st.tuples(st.integers(0, 4096), st.floats(0.0, 1e4), st.floats(0.0, 1000.0)), max_size=40)


def line_of(*samples: tuple[float, float]) -> CostLine:
    line = CostLine()
    for tokens, seconds in samples:
        line.add(0.0, tokens, seconds)
    return line


def test_samples_are_forgotten():
    line = line_of(*[(8, 0.1)] * 32)
    assert line.fit(600.0) is not None
    assert line.fit(900.0) is None


@pytest.mark.parametrize("at", [0, 10, 30])
def test_one_step_that_compiles_does_not_count(at):
    samples = [(8 * (i % 4 + 1), 0.02) for i in range(31)]
    samples.insert(at, (64, 30.0))
    fixed, per_token = line_of(*samples).fit(0.0)
    assert 0.02 <= fixed + 32 * per_token < 0.04


@given(SAMPLES, st.floats(0.0, 2000.0), st.none() | st.tuples(st.floats(1e-4, 100.0), st.just(0.0)))
def test_a_fit_is_finite_and_never_negative(samples, later, at_zero):
    line = CostLine()
    now = 0.0
    for tokens, seconds, after in samples:
        now += after
        line.add(now, tokens, seconds)
    if (fit := line.fit(now + later, at_zero)) is not None:
        assert all(0.0 <= value < 1e12 for value in fit)


@given(st.lists(st.tuples(st.floats(0.0, 400.0), st.integers(0, 1000)), min_size=1, max_size=60))
def test_the_largest_sample_fades(samples):
    line, seen, now = CostLine(), [], 0.0
    for after, tokens in samples:
        now += after
        line.add(now, tokens, 0.1)
        seen.append((now, tokens))
        lately = [tokens for at, tokens in seen if now - at <= 900.0]
        assert max(lately) // 2 <= line.largest(now) <= max(tokens for _, tokens in seen)
    assert line.largest(now + 9000.0) <= 1


def test_with_two_steps_in_flight_a_step_is_over_when_the_second_one_after_it_is_built():
    steps = StepTimes(in_flight=2)
    assert steps.built(1.0, {"a"}, 40) is None
    assert steps.built(1.0, {"a"}, 0) is None  # at once: the queue is not full
    assert steps.built(1.5, {"a"}, 0) == (40, 0.5)
    assert steps.built(1.75, {"a"}, 8) == (0, 0.75)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_pause_does_not_count(in_flight):
    steps = StepTimes(in_flight)
    for now in range(in_flight + 1):
        steps.built(float(now), {"a"}, 5)
    steps.alive.discard("a")
    assert steps.built(100.0, {"b"}, 7) is None
    measured = [steps.built(101.0 + now, {"b"}, 0) for now in range(in_flight)]
    assert measured[-1] == (7, float(in_flight))


def test_a_step_that_computes_nothing_does_not_count():
    steps = StepTimes(in_flight=1)
    steps.built(1.0, {"a"}, 5)
    assert steps.built(2.0, set(), 0) is None
    assert steps.built(3.0, {"a"}, 5) is None
    assert steps.built(4.0, {"a"}, 5) == (5, 1.0)


@given(st.floats(0.0, 1.0), st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 0.5)), min_size=1, max_size=60))
def test_no_more_is_spent_than_the_share_a_burst_and_the_last_prompt(share, wishes):
    budget, now, spent = TimeBudget(share, 0.0), 0.0, 0.0
    for after, seconds in wishes:
        now += after
        if budget.has_any(now):
            budget.spend(now, seconds)
            spent += seconds
        assert spent <= share * now + 0.25 + 0.5 + 1e-6
