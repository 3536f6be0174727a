# SPDX-License-Identifier: Apache-2.0
"""How long steps that compute nothing wait."""

import pytest

from harness.clock import Clock, clock_of
from vllm_ascend_pd.scheduler import idle
from vllm_ascend_pd.scheduler.idle import FIRST_S, IdleWait


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return clock_of(idle, monkeypatch)


def test_the_longer_nothing_happens_the_longer_a_step_waits(clock):
    wait = IdleWait(0.05)
    waits = []
    while clock.now < 101.0:
        waits.append(wait.next(computes=False, news=False))
        clock.now += waits[-1]
    assert waits[0] == FIRST_S
    assert waits == sorted(waits)
    assert waits[-1] == 0.05
    assert len(waits) < 30  # of 100, were all as short as the first


@pytest.mark.parametrize(("computes", "news"), [(True, False), (False, True), (True, True)])
def test_what_happens_makes_it_wait_shortly_again(clock, computes, news):
    wait = IdleWait(0.05)
    clock.now += 10
    assert wait.next(computes=False, news=False) == 0.05
    assert wait.next(computes, news) == (0.0 if computes else FIRST_S)
    assert wait.next(computes=False, news=False) == FIRST_S


def test_a_bound_below_the_first_wait_holds(clock):
    clock.now += 10
    assert IdleWait(0.001).next(computes=False, news=True) == 0.001


def test_engines_in_lockstep_never_wait(clock):
    wait = IdleWait(0.0)
    clock.now += 10
    assert wait.next(computes=False, news=False) == 0.0
