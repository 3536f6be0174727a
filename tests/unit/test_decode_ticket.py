# SPDX-License-Identifier: Apache-2.0
"""A decode rank's ticket: which grants, reports and leases make it received or failed, and when writers are done."""

import msgspec
from tickets import (
    DEADLINE,
    LEASE_S,
    LEFT,
    RIGHT,
    SETTLE_S,
    STRANGER,
    asks,
    failed,
    opened,
    wrote,
)

from vllm_ascend_pd.core.decode_ticket import TicketState
from vllm_ascend_pd.core.protocol import Granted, GrantRefused


def test_both_writers_write_and_the_ticket_is_received():
    ticket = opened()
    assert ticket.grant(asks(LEFT), 0.0) == ticket.grant(asks(RIGHT), 0.0) == Granted(LEASE_S)
    assert ticket.live_writers() == [LEFT, RIGHT]
    assert ticket.report(wrote(LEFT, 100, 70), 1.0)
    assert (ticket.state, ticket.is_quiesced(1.0), ticket.live_writers()) == (TicketState.OPEN, False, [RIGHT])
    assert ticket.report(wrote(RIGHT, 50, 50), 1.0)
    assert (ticket.state, ticket.is_quiesced(1.0), ticket.live_writers()) == (TicketState.RECEIVED, True, [])
    assert (ticket.num_bytes, ticket.bytes_before_end) == (150, 120)


def test_the_smallest_cached_count_of_all_reports_counts():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    assert ticket.cached_tokens is None
    ticket.report(msgspec.structs.replace(wrote(LEFT), cached_tokens=64), 1.0)
    assert ticket.cached_tokens == 64
    ticket.report(msgspec.structs.replace(wrote(RIGHT), cached_tokens=32), 1.0)
    assert (ticket.state, ticket.cached_tokens) == (TicketState.RECEIVED, 32)


def test_an_engine_that_does_not_say_what_it_had_cached_counts_as_one_that_had_nothing():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    assert ticket.cached_tokens == 0


def test_a_report_that_is_not_believed_says_nothing_of_the_cache():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.report(msgspec.structs.replace(wrote(STRANGER), cached_tokens=1), 1.0)
    assert ticket.cached_tokens is None


def test_a_report_that_comes_twice_counts_once():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.report(wrote(LEFT, 100), 1.0)
    assert ticket.report(wrote(LEFT, 100), 1.0)
    assert ticket.report(failed(LEFT), 1.0)
    assert (ticket.state, ticket.num_bytes) == (TicketState.OPEN, 100)


def test_one_writer_alone_is_not_enough():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    ticket.tick(DEADLINE)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "the transfer took too long")


def test_a_tensor_needs_all_its_writers():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT, (1,)), 0.0)  # not tensor 2, of which LEFT brings other heads
    ticket.report(wrote(LEFT), 1.0)
    ticket.report(wrote(RIGHT), 1.0)
    assert ticket.state is TicketState.OPEN


def test_a_writer_that_fails_fails_the_ticket():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    assert ticket.report(failed(RIGHT), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 1: it broke")
    assert ticket.live_writers() == [LEFT]
    assert ticket.grant(asks(LEFT), 1.0) == GrantRefused("the ticket is failed: prefill rank 1: it broke", retry=False)
    ticket.fail("prefill answered 502")
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 1: it broke")
    assert not ticket.is_quiesced(1.0)  # the other one may still write
    assert ticket.report(wrote(LEFT), 1.0)
    assert ticket.state is TicketState.FAILED
    assert ticket.is_quiesced(1.0)


def test_a_writer_that_goes_silent():
    ticket = opened()
    ticket.grant(asks(LEFT), 5.0)
    ticket.tick(5.0 + LEASE_S - 0.1)
    assert ticket.state is TicketState.OPEN
    ticket.tick(5.0 + LEASE_S)  # one that runs would have renewed it
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 0 of engine prefill-0 went silent")


def test_blocks_are_kept_for_a_writer_whose_process_is_stopped():
    """It may be resumed at any time, and then sends the rest of its bytes."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.fail("the request was aborted")
    over = LEASE_S + SETTLE_S
    assert (ticket.is_quiesced(1e6), ticket.overdue(over - 0.1), ticket.overdue(over)) == (False, [], [LEFT])
    assert ticket.report(failed(LEFT, settle_s=4.0), 1e6)
    assert (ticket.is_quiesced(1e6 + 4.0), ticket.overdue(1e6), ticket.overdue(1e6 + 4.0)) == (False, [], [LEFT])
    assert ticket.report(failed(LEFT), 1e6 + 4.0)
    assert (ticket.is_quiesced(1e6 + 4.0), ticket.overdue(1e6 + 4.0)) == (True, [])


def test_a_process_that_has_ended_writes_nothing_once_its_lease_is_over():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.fail("the request was aborted")
    ticket.gone(LEFT, 1.0)
    ticket.gone(RIGHT, 1.0)  # was granted nothing
    assert not ticket.is_quiesced(LEASE_S + SETTLE_S - 0.1)
    assert ticket.is_quiesced(LEASE_S + SETTLE_S)


def test_a_process_that_went_on_before_it_ended():
    """The bytes that it sent then have the settling time to arrive."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.fail("the request was aborted")
    for now in (100.0, 101.0):
        ticket.gone(LEFT, now)
    assert not ticket.is_quiesced(100.0 + SETTLE_S - 0.1)
    assert ticket.is_quiesced(100.0 + SETTLE_S)


def test_a_process_that_ends_before_its_bytes_have_settled():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    ticket.fail("the request was aborted")
    ticket.gone(LEFT, 1.5)
    assert not ticket.is_quiesced(4.9)
    assert ticket.is_quiesced(5.0)


def test_a_writer_that_comes_back_on_another_connection_is_not_gone():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.gone(LEFT, 0.5)
    ticket.grant(asks(LEFT), 1.0)
    ticket.grant(asks(RIGHT), 1.0)
    ticket.gone(RIGHT, 1.0)
    ticket.report(failed(RIGHT, settle_s=4.0), 1.0)
    ticket.fail("the request was aborted")
    assert ticket.overdue(1e6) == [LEFT, RIGHT]
    assert not ticket.is_quiesced(1e6)


def test_each_writer_states_how_long_its_bytes_may_outlast_its_lease():
    ticket = opened()
    ticket.grant(asks(LEFT, settle_s=0.0), 0.0)
    ticket.grant(asks(RIGHT, settle_s=20.0), 0.0)
    ticket.tick(LEASE_S)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 0 of engine prefill-0 went silent")
    assert (ticket.overdue(LEASE_S + 19.9), ticket.overdue(LEASE_S + 20.0)) == ([LEFT], [LEFT, RIGHT])


def test_bytes_of_a_failed_write_may_still_arrive():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 0: it broke")
    ticket.fail("prefill answered 502")
    assert ticket.live_writers() == []  # nothing to revoke
    assert not ticket.is_quiesced(1.0)
    assert ticket.report(failed(LEFT), 3.0)
    assert ticket.is_quiesced(3.0)


def test_a_repeated_report_does_not_restart_the_settling_time():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    assert ticket.report(failed(LEFT, settle_s=4.0), 4.0)
    assert (ticket.overdue(4.9), ticket.overdue(5.0)) == ([], [LEFT])


def test_success_and_failure_of_one_transfer():
    """If a writer reports both, the first report counts."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    ticket.report(wrote(LEFT), 2.0)
    ticket.report(wrote(RIGHT), 2.0)
    assert (ticket.state, ticket.num_bytes) == (TicketState.FAILED, 0)


def test_settling_after_another_writer_failed():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    ticket.report(failed(RIGHT), 1.0)
    assert ticket.report(failed(LEFT, settle_s=4.0), 2.0)
    ticket.fail("prefill answered 502")
    assert ticket.reason == "prefill rank 1: it broke"
    assert not ticket.is_quiesced(6.0)
    ticket.report(failed(LEFT), 6.0)
    assert ticket.is_quiesced(6.0)
