# SPDX-License-Identifier: Apache-2.0
"""What threads share of a transfer: the control thread publishes views, others read them and report failures."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.scheduling import make_ticket
from harness.tickets import ticket_with
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.prefill_ticket import Destination, Phase, PrefillTicket
from vllm_ascend_pd.core.protocol import Granted, GrantRefused, Message, RankDescription
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.prefill.transfer import LeaseCheck, Transfer, Withdrawals

KEY = (0, 0)


def make_transfer() -> Transfer:
    sender: Any = None
    state = PrefillTicket(time.monotonic() + 60.0)
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


# --- what the sender asks without a lock, once for many requests -------------------------------------------------


RANK = RankDescription(*KEY, "", "", RankCaches((), ()))
NEVER = 1000.0
TICKET = ticket_with(
    request_id="request", remote_block_ids=[[1]], remote_engine_id="decode", remote_port=1, num_tokens=16
)

ANSWERS = st.one_of(
    st.integers(1, 10).map(lambda seconds: Granted(float(seconds))),
    st.just(GrantRefused("later", retry=True)),
    st.just(GrantRefused("no", retry=False)),
)
EVENTS = st.one_of(ANSWERS, st.sampled_from(["contacted", "fail", "finish"]))


def happen(state: PrefillTicket, event: Message | str, now: float) -> None:
    if event == "contacted":
        if state.destinations is None:
            state.contacted({KEY: Destination(RANK, (0,))})
    elif event == "fail":
        state.fail("for the test", PushFailure.ABORTED)
    elif event == "finish":
        state.finish(now)
    elif state.destinations is not None:
        state.asked(KEY, now)
        state.answered(KEY, now, event)


@given(st.booleans(), st.lists(st.tuples(st.integers(0, 2), EVENTS | st.none(), st.integers(0, 6)), max_size=40))
def test_many_are_asked_like_one_after_the_other(
    are_contacted: bool, events: list[tuple[int, Message | str | None, int]]
) -> None:
    """`events`: what happens to which transfer, and how many seconds pass then."""
    if are_contacted:  # by chance, this takes too many events
        events = [(which, "contacted", 0) for which in range(3)] + events
    withdrawals = Withdrawals()
    sender: Any = None  # nothing is waited for
    transfers = [Transfer(str(i), TICKET, sender, PrefillTicket(NEVER), withdrawals) for i in range(3)]
    states = [transfer.state for transfer in transfers]
    now, check, asked_again = 0.0, None, LeaseCheck(transfers, KEY)
    leases = [float("-inf")] * len(states)
    with mock.patch("time.monotonic", side_effect=lambda: now):
        for which, event, seconds in events:
            if event is not None:
                with transfers[which].changing() as state:
                    happen(state, event, now)
            now += seconds
            plain = LeaseCheck(transfers, KEY).may_plan()
            assert plain == all(s.failure is None and s.view().writable_until(KEY) > now for s in states)
            if all(state.phase is Phase.WRITING for state in states):  # nothing is asked for a transfer that has ended
                assert asked_again.may_plan() == plain
            if plain:
                assert all(state.view().may_write(KEY, now) for state in states)
            if all(state.destinations is not None for state in states):
                check = check or LeaseCheck(transfers, KEY)  # kept, as if for a long write
                assert check.may_begin() == all(state.view().lease_until(KEY) > now for state in states)
                before, leases = leases, [state.view().lease_until(KEY) for state in states]
                assert all(until >= earlier for until, earlier in zip(leases, before, strict=True))
