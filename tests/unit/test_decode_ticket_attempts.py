# SPDX-License-Identifier: Apache-2.0
"""A decode rank's ticket with several attempts: an attempt writes everything, once no earlier writer can write."""

import msgspec
import pytest
from tickets import (
    COVERS,
    DEADLINE,
    EXPECTED,
    LEASE_S,
    LEFT,
    P_TP,
    RIGHT,
    SETTLE_S,
    STRANGER,
    TICKET_ID,
    again,
    asks,
    failed,
    opened,
    wrote,
)

from vllm_ascend_pd.core.decode_ticket import MAX_ATTEMPTS, TicketState
from vllm_ascend_pd.core.protocol import Complete, Granted, GrantRefused, WriteReport
from vllm_ascend_pd.core.topology import sharding


def test_another_attempt_writes_everything_again():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    ticket.report(wrote(RIGHT, 50, 50), 1.0)
    ticket.report(failed(LEFT), 1.0)
    first = again()
    assert ticket.admit(first, 2.0) is None
    assert (ticket.state, ticket.attempt, ticket.reason, ticket.engine_known) == (TicketState.OPEN, 1, "", False)
    ticket.expect("prefill-0", P_TP, EXPECTED)
    assert ticket.grant(first, 2.0) == ticket.grant(again(RIGHT), 2.0) == Granted(LEASE_S)
    for request in (first, again(RIGHT)):
        assert ticket.state is TicketState.OPEN
        ticket.report(WriteReport(TICKET_ID, 1, request.writer, None, 10, 5), 3.0)
    assert (ticket.state, ticket.num_bytes, ticket.bytes_before_end) == (TicketState.RECEIVED, 20, 10)


def test_another_attempt_may_come_from_an_engine_of_another_shape():
    ticket = opened()
    ticket.report(failed(LEFT), 1.0)
    request = asks(STRANGER, (0, 1, 2), attempt=3, sharding=sharding(1))
    assert ticket.admit(request, 1.0) is None
    ticket.expect("prefill-9", sharding(1), frozenset((tensor, 0) for tensor in range(3)))
    assert ticket.grant(request, 1.0) == Granted(LEASE_S)
    assert ticket.grant(again(attempt=1), 1.0) == GrantRefused("attempt 1 is over: ", retry=False)


@pytest.mark.parametrize("silent", [True, False])
def test_another_attempt_waits_for_the_writers_of_the_one_before(silent):
    """It waits even for writers that look alive, because the proxy may know sooner that their engine is dead."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    now = LEASE_S + SETTLE_S if silent else 1.0
    answer = ticket.grant(again(), now)
    assert isinstance(answer, GrantRefused)
    assert (answer.retry, answer.wait_s > 0, ticket.state) == (True, True, TicketState.FENCING)
    assert ticket.live_writers() == [LEFT]
    assert isinstance(ticket.grant(asks(LEFT), now), GrantRefused)  # no renewal
    over = LEASE_S + SETTLE_S
    assert ticket.admit(again(), over).retry
    ticket.gone(LEFT, over)
    assert ticket.admit(again(), over).retry
    assert ticket.admit(again(), over + SETTLE_S) is None


def test_the_highest_attempt_is_served_next():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.admit(again(attempt=2), 1.0).retry
    assert not ticket.admit(again(attempt=1), 1.0).retry
    ticket.report(failed(LEFT), 1.0)
    assert not ticket.admit(again(attempt=1), 1.0).retry
    assert ticket.admit(again(attempt=2), 1.0) is None


def test_attempts_are_bounded():
    ticket = opened()
    ticket.report(failed(LEFT), 1.0)
    assert not ticket.admit(again(attempt=MAX_ATTEMPTS), 1.0).retry
    assert ticket.admit(again(attempt=MAX_ATTEMPTS - 1), 1.0) is None


def test_an_altered_ticket_does_not_end_an_attempt():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.admit(again(digest="e" * 32), 1.0).retry
    assert ticket.state is TicketState.OPEN


def test_what_a_transfer_of_another_attempt_reports_is_not_counted():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(failed(LEFT), 1.0)
    ticket.admit(again(), 1.0)
    ticket.expect("prefill-0", P_TP, EXPECTED)
    ticket.grant(again(), 1.0)
    for attempt in (0, 1):
        assert not ticket.report(msgspec.structs.replace(failed(LEFT), attempt=attempt), 2.0)
        assert not ticket.report(msgspec.structs.replace(wrote(LEFT), attempt=attempt), 2.0)
    assert (ticket.state, ticket.live_writers()) == (TicketState.OPEN, [again().writer])


def test_a_rank_has_one_transfer_of_an_attempt():
    """A rank that got the same ticket twice has two transfers. The second one is refused, and cannot end the first."""
    ticket = opened()
    twice = msgspec.structs.replace(RIGHT, transfer=5)
    ticket.grant(asks(RIGHT), 0.0)
    for covers in (COVERS[RIGHT], ()):
        assert "in another transfer" in ticket.grant(asks(twice, covers), 0.0).reason
    assert not ticket.report(failed(twice), 1.0)
    assert not ticket.report(wrote(twice), 1.0)
    assert (ticket.state, ticket.live_writers()) == (TicketState.OPEN, [RIGHT])


def test_a_writer_that_asks_after_everything_was_received_need_not_write():
    ticket = opened()
    for writer in (LEFT, RIGHT):
        ticket.grant(asks(writer), 0.0)
        ticket.report(wrote(writer), 1.0)
    assert ticket.state is TicketState.RECEIVED
    assert ticket.grant(again(), 2.0) == Complete()
    assert isinstance(ticket.grant(again(digest="e" * 32), 2.0), GrantRefused)


def test_no_other_attempt_comes():
    """A proxy that ignores failures only says that prefill has ended."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.prefill_has_ended(1.0, 30.0)
    ticket.report(failed(LEFT), 2.0)
    ticket.tick(5.9)
    assert ticket.state is TicketState.FENCING
    ticket.tick(6.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 0: it broke")


def test_another_attempt_is_waited_for_as_long_as_it_asks():
    ticket = opened(queue_deadline=1000.0)
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.admit(again(), 1.0).retry
    ticket.prefill_has_ended(1.0, 3.0)  # this one's
    for now in range(2, 30, 4):
        assert ticket.admit(again(), now).retry
    ticket.report(failed(LEFT), 30.0)
    assert ticket.admit(again(), 30.0) is None
    ticket.tick(32.9)  # and its other ranks for as long as usual
    assert ticket.state is TicketState.OPEN
    ticket.tick(33.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill ended without writing everything")


def test_fencing_ends_with_the_deadline():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    assert isinstance(ticket.admit(again(), DEADLINE), GrantRefused)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 0: it broke")
