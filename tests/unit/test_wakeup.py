# SPDX-License-Identifier: Apache-2.0
"""Ranks wake decode's scheduler; whatever goes wrong with that harms neither."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from vllm_ascend_pd.transport.wakeup import WakeupSender, WakeupSocket

SHORT_S, LONG_S = 0.05, 60.0


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
