# SPDX-License-Identifier: Apache-2.0
"""What threads share of a ticket on a prefill rank: any thread fails it, the control thread takes answers, and the
sender's thread waits for them."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.prefill_ticket import Destination, PrefillTicket
from vllm_ascend_pd.core.protocol import Granted, Message, RankDescription
from vllm_ascend_pd.core.reasons import PushFailure

KEY = (0, 0)


@pytest.fixture
def ticket() -> PrefillTicket:
    return PrefillTicket(time.monotonic() + 60.0)


def contact(ticket: PrefillTicket) -> None:
    ticket.contacted({KEY: Destination(RankDescription(*KEY, "", "", RankCaches((), ())), (0,))})


def answer(ticket: PrefillTicket, message: Message) -> None:
    now = time.monotonic()
    ticket.asked(KEY, now)
    ticket.answered(KEY, now, message)


def fail(ticket: PrefillTicket) -> None:
    ticket.fail("for the test", PushFailure.ABORTED)


def test_a_failure_on_another_thread_stops_writes_at_once_and_is_what_the_writing_ends_with(
    ticket: PrefillTicket,
) -> None:
    contact(ticket)
    answer(ticket, Granted(30.0))
    assert ticket.await_write(KEY)
    with ThreadPoolExecutor(1) as other:
        other.submit(ticket.fail, "the device failed", PushFailure.DEVICE).result()
    ticket.fail("a later reason", PushFailure.INTERNAL)
    assert not ticket.await_write(KEY)
    assert time.monotonic() < ticket.lease_until(KEY), "what has begun may end"
    assert ticket.finish(time.monotonic()) is False
    assert (ticket.failure, ticket.cause) == ("the device failed", PushFailure.DEVICE)


def test_a_failure_comes_before_decode_is_notified_or_counts_for_nothing(ticket: PrefillTicket) -> None:
    """Or a transfer would be reported as complete that has failed (R1)."""
    contact(ticket)
    answer(ticket, Granted(30.0))
    with ThreadPoolExecutor(1) as other, ticket._changed:
        failing = other.submit(fail, ticket)
        with pytest.raises(TimeoutError):
            failing.result(0.05)
        assert ticket.finish(time.monotonic()) is True
        assert ticket.begin_notifying(0.0)
    assert ticket.failure is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda ticket: answer(ticket, Granted(30.0)), True),
        (fail, False),
    ],
    ids=["granted", "failed"],
)
def test_the_sender_wakes_up_when_something_changes(
    ticket: PrefillTicket, change: Callable[[PrefillTicket], None], expected: bool
) -> None:
    contact(ticket)
    with ThreadPoolExecutor(1) as sender:
        allowed = sender.submit(ticket.await_write, KEY)
        time.sleep(0.05)
        assert not allowed.done()
        change(ticket)
        assert allowed.result(10) is expected


def test_the_sender_wakes_up_when_it_is_known_where_to_write(ticket: PrefillTicket) -> None:
    with ThreadPoolExecutor(1) as sender:
        located = sender.submit(ticket.await_write, None)
        time.sleep(0.05)
        assert not located.done()
        contact(ticket)
        assert located.result(10) is True


def test_a_lease_that_has_run_out_fails_it_though_a_renewal_crosses(ticket: PrefillTicket) -> None:
    """A layer that was not written must not count as delivered (R1)."""
    contact(ticket)
    answer(ticket, Granted(0.05))
    time.sleep(0.1)
    assert not ticket.await_write(KEY)
    answer(ticket, Granted(30.0))
    assert not ticket.await_write(KEY)
    assert ticket.finish(time.monotonic()) is False
    assert ticket.failure == "the lease for decode rank (0, 0) ran out"
