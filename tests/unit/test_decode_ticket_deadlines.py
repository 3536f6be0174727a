# SPDX-License-Identifier: Apache-2.0
"""A decode rank's ticket over time: renewals, deadlines, the wait in a queue, and the end of prefill."""

from tickets import (
    DEADLINE,
    LEASE_S,
    LEFT,
    RIGHT,
    SETTLE_S,
    asks,
    failed,
    opened,
    wrote,
)

from vllm_ascend_pd.core.decode_ticket import TicketState
from vllm_ascend_pd.core.protocol import Granted, GrantRefused

NOBODY_BEGAN = (
    "no prefill engine began within queue_timeout_s: the prompt waited in the proxy's line or in prefill's queue"
)


def test_a_renewal_extends_the_lease():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.grant(asks(LEFT), 9.0) == Granted(LEASE_S)
    ticket.tick(9.0 + LEASE_S - 0.1)
    assert ticket.state is TicketState.OPEN


def test_no_prefill_rank_asked_before_the_deadline():
    ticket = opened()
    ticket.tick(DEADLINE - 0.1)
    assert ticket.state is TicketState.OPEN
    ticket.tick(DEADLINE)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, NOBODY_BEGAN)
    assert ticket.is_quiesced(DEADLINE)


def test_no_grant_after_the_deadline_even_if_nobody_looked_at_the_clock():
    ticket = opened()
    assert ticket.grant(asks(LEFT), DEADLINE) == GrantRefused(f"the ticket is failed: {NOBODY_BEGAN}", retry=False)
    assert ticket.is_quiesced(DEADLINE)


def renewed(ticket, begin, end):
    """Renews the grant of one of two writers, from `begin` to `end`."""
    for now in range(begin, end, int(LEASE_S) - 1):
        assert ticket.grant(asks(LEFT), now) == Granted(LEASE_S)


def test_time_in_a_queue_for_prefill_does_not_count():
    ticket = opened(queue_deadline=1000.0, transfer_s=60.0)
    ticket.tick(990.0)
    assert ticket.state is TicketState.OPEN
    renewed(ticket, 990, 1050)
    ticket.tick(1049.9)
    assert ticket.state is TicketState.OPEN
    ticket.tick(1050.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "the transfer took too long")


def test_only_a_writer_with_the_ticket_ends_the_wait_in_the_queue():
    ticket = opened(queue_deadline=1000.0, transfer_s=60.0)
    assert isinstance(ticket.grant(asks(LEFT, digest="e" * 32), 0.0), GrantRefused)
    assert ticket.deadline == 1000.0


def test_no_renewal_of_a_lease_that_ran_out():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    answer = ticket.grant(asks(LEFT), LEASE_S + SETTLE_S)
    assert isinstance(answer, GrantRefused)
    assert "went silent" in answer.reason


def test_prefill_ended_without_asking_to_write():
    ticket = opened()
    ticket.prefill_has_ended(0.0, 5.0)
    ticket.tick(4.9)
    assert ticket.state is TicketState.OPEN
    ticket.tick(5.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill ended without writing everything")
    assert ticket.is_quiesced(5.0)


def test_prefill_ended_while_its_writers_still_write():
    ticket = opened()
    ticket.prefill_has_ended(0.0, 5.0)
    ticket.grant(asks(LEFT), 4.0)
    ticket.tick(6.0)
    assert ticket.state is TicketState.OPEN
    assert ticket.grant(asks(RIGHT), 6.0) == Granted(LEASE_S)
    ticket.report(wrote(RIGHT), 7.0)
    ticket.report(wrote(LEFT), 7.0)
    ticket.tick(8.0)
    assert ticket.state is TicketState.RECEIVED


def test_prefill_ended_and_one_writer_never_came():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.prefill_has_ended(0.0, 5.0)
    ticket.report(wrote(LEFT), 1.0)
    answer = ticket.grant(asks(RIGHT), 5.0)
    assert answer == GrantRefused("the ticket is failed: prefill ended without writing everything", retry=False)


def test_an_open_ticket_is_never_quiesced():
    """It may grant a lease at any time, even if it has none now."""
    ticket = opened()
    assert not ticket.is_quiesced(0.0)
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.is_quiesced(LEASE_S + SETTLE_S)


def test_a_cancelled_ticket_waits_for_its_writers():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.fail("the request was aborted")
    assert not ticket.is_quiesced(1.0)
    assert ticket.grant(asks(LEFT), 1.0) == GrantRefused("the ticket is failed: the request was aborted", retry=False)
    ticket.report(failed(LEFT), 2.0)
    assert ticket.is_quiesced(2.0)
