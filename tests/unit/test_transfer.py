# SPDX-License-Identifier: Apache-2.0
"""What threads share of a transfer: the control thread publishes views, others read them and report failures."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.scheduling import make_ticket
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.prefill_ticket import Destination, PrefillTicket
from vllm_ascend_pd.core.protocol import Granted, Message, RankDescription
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.prefill.transfer import Transfer, Withdrawals

KEY = (0, 0)


def make_transfer(grant_timeout_s: float = 60.0) -> Transfer:
    sender: Any = None
    state = PrefillTicket(time.monotonic() + grant_timeout_s)
    return Transfer("request", make_ticket(10, [1]), sender, state, Withdrawals())


def contact(transfer: Transfer) -> None:
    with transfer.changing() as state:
        state.contacted({KEY: Destination(RankDescription(*KEY, "", "", RankCaches((), ())), (0,))})


def answer(transfer: Transfer, message: Message) -> None:
    now = time.monotonic()
    with transfer.changing() as state:
        state.asked(KEY, now)
        state.answered(KEY, now, message)


def test_a_failure_stops_writes_at_once_and_the_state_takes_it_over_before_it_ends() -> None:
    transfer = make_transfer()
    contact(transfer)
    answer(transfer, Granted(30.0))
    assert transfer.await_grant(KEY)
    before = transfer.withdrawals.count
    with ThreadPoolExecutor(1) as other:
        other.submit(transfer.fail, "the device failed", PushFailure.DEVICE).result()
    transfer.fail("a later reason", PushFailure.INTERNAL)
    assert transfer.withdrawals.count > before
    assert not transfer.await_grant(KEY)
    assert transfer.writable_until(KEY) < time.monotonic() < transfer.lease_until(KEY)
    assert transfer.state.failure is None, "another thread does not touch it"
    with transfer.changing() as state:
        assert state.finish(time.monotonic()) is False
    assert (state.failure, state.cause) == ("the device failed", PushFailure.DEVICE)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda transfer: answer(transfer, Granted(30.0)), True),
        (lambda transfer: transfer.fail("for the test", PushFailure.ABORTED), False),
    ],
    ids=["granted", "failed"],
)
def test_the_sender_wakes_up_when_something_changes(change: Callable[[Transfer], None], expected: bool) -> None:
    transfer = make_transfer()
    contact(transfer)
    with ThreadPoolExecutor(1) as sender:
        allowed = sender.submit(transfer.await_grant, KEY)
        time.sleep(0.05)
        assert not allowed.done()
        change(transfer)
        assert allowed.result(10) is expected


def test_a_lease_that_has_run_out_fails_it_though_a_renewal_crosses() -> None:
    """A layer that was not written must not count as delivered (R1)."""
    transfer = make_transfer()
    contact(transfer)
    answer(transfer, Granted(0.05))
    time.sleep(0.1)
    assert not transfer.await_grant(KEY)
    answer(transfer, Granted(30.0))
    assert not transfer.await_grant(KEY)
    with transfer.changing() as state:
        assert state.finish(time.monotonic()) is False
    assert state.failure == "the lease for decode rank (0, 0) ran out"
