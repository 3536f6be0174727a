# SPDX-License-Identifier: Apache-2.0
"""How long steps that compute nothing wait, and what ranks do to wake decode's scheduler."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from harness.clock import Clock, clock_of
from vllm_ascend_pd.transport import wakeup as wakeup_module
from vllm_ascend_pd.transport.wakeup import FIRST_S, IdleWait, WakeupSender, WakeupSocket

SHORT_S, LONG_S = 0.05, 60.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return clock_of(wakeup_module, monkeypatch)


def test_the_longer_nothing_happens_the_longer_a_step_waits(clock):
    wait = IdleWait(0.05, in_flight=2)
    waits = []
    while clock.now < 101.0:
        waits.append(wait.next(computes=False, news=False))
        clock.now += waits[-1]
    assert waits[1::2] == [0.0] * (len(waits) // 2)  # one of those under way
    waits = waits[::2]
    assert waits[0] == FIRST_S
    assert waits == sorted(waits)
    assert waits[-1] == 0.05
    assert len(waits) < 30  # of 100, were all as short as the first


@pytest.mark.parametrize(("computes", "news"), [(True, False), (False, True), (True, True)])
def test_what_happens_makes_it_wait_shortly_again(clock, computes, news):
    wait = IdleWait(0.05, in_flight=2)
    clock.now += 10
    assert wait.next(computes=False, news=False) == 0.05
    assert wait.next(computes, news) == 0.0
    waits = [wait.next(computes=False, news=False) for _ in range(2)]
    assert waits == ([0.0, FIRST_S] if computes else [FIRST_S, 0.0])


@pytest.mark.parametrize("in_flight", [2, 3, 5])
def test_none_waits_behind_a_step_that_computes(clock, in_flight):
    wait = IdleWait(0.05, in_flight)
    for _ in range(2):
        assert wait.next(computes=True, news=False) == 0.0
        waits = [wait.next(computes=False, news=news) for news in (False, True, *[False] * in_flight)]
        assert [each > 0 for each in waits] == [k % in_flight == 0 for k in range(1, in_flight + 3)]


def test_engines_in_lockstep_never_wait(clock):
    wait = IdleWait(0.0, in_flight=2)
    clock.now += 10
    assert wait.next(computes=False, news=False) == 0.0
    assert wait.next(computes=False, news=False, waits_here=True) == 0.0
    wait.pause(is_idle=True)
    assert clock.now == 110


@pytest.fixture
def wakeup() -> Iterator[WakeupSocket]:
    wakeup = WakeupSocket()
    yield wakeup
    wakeup.close()


@pytest.fixture
def sender() -> Iterator[WakeupSender]:
    sender = WakeupSender()
    yield sender
    sender.close()


def was_woken(wakeup: WakeupSocket, timeout_s: float) -> bool:
    began = time.monotonic()
    wakeup.wait(timeout_s)
    return time.monotonic() - began < 0.9 * timeout_s


def test_the_scheduler_waits_in_place_of_a_step(monkeypatch, wakeup, sender):
    """Until it is woken. It does not wait in place of a step with news, or behind one that computes."""
    monkeypatch.setattr(wakeup_module, "PAUSE_S", LONG_S)
    monkeypatch.setattr(wakeup_module, "FIRST_S", LONG_S)
    wait = IdleWait(LONG_S, in_flight=2, wakeup=wakeup)
    began = time.monotonic()
    for news in (False, True):
        assert wait.next(computes=True, news=news) == 0.0
        for is_idle in (True, False):
            wait.pause(is_idle)
            assert wait.next(computes=False, news=news, waits_here=True) == 0.0
        wait.pause(is_idle=False)
    assert wait.next(computes=False, news=False, waits_here=True) == 0.0
    assert wait.next(computes=False, news=False, waits_here=True) == 0.0
    waker = threading.Timer(0.1, sender.wake, [wakeup.address])
    waker.start()
    wait.pause(is_idle=True)
    assert 0.1 <= time.monotonic() - began < LONG_S / 2
    waker.join()


def test_a_wakeup_counts_once(wakeup, sender):
    wait = IdleWait(SHORT_S, in_flight=1, wakeup=wakeup)
    sender.wake(wakeup.address)
    wait.pause(is_idle=False)
    assert not was_woken(wakeup, SHORT_S)


def test_sending_many_wakeups_does_not_block(wakeup, sender):
    for _ in range(10_000):  # more than the kernel keeps
        sender.wake(wakeup.address)
    assert was_woken(wakeup, LONG_S)
    wakeup.clear()
    assert not was_woken(wakeup, SHORT_S)


def test_a_wakeup_that_nobody_receives_does_no_harm(sender):
    gone = WakeupSocket()
    gone.close()
    sender.wake(gone.address)
    sender.wake("")
    with closing(WakeupSocket()) as other:
        sender.wake(other.address)
        assert was_woken(other, LONG_S)
