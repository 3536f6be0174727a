# SPDX-License-Identifier: Apache-2.0
"""What a decode rank makes of grant requests, reports and time."""

import msgspec
import pytest
from tickets import (
    DEADLINE,
    DIGEST,
    LEASE_S,
    LEFT,
    RIGHT,
    SETTLE_S,
    STRANGER,
    TICKET_ID,
    TWIN,
    asks,
    failed,
    opened,
    wrote,
)

from vllm_ascend_pd.core.protocol import Granted, Refused, Writer
from vllm_ascend_pd.core.ticket import ConsumerTicket, State
from vllm_ascend_pd.core.topology import sharding


def test_both_writers_write_and_the_ticket_is_received():
    ticket = opened()
    assert ticket.grant(asks(LEFT), 0.0) == ticket.grant(asks(RIGHT), 0.0) == Granted(LEASE_S)
    assert ticket.live_writers() == [LEFT, RIGHT]
    assert ticket.report(wrote(LEFT, 100, 70), 1.0)
    assert (ticket.state, ticket.quiet(1.0), ticket.live_writers()) == (State.OPEN, False, [RIGHT])
    assert ticket.report(wrote(RIGHT, 50, 50), 1.0)
    assert (ticket.state, ticket.quiet(1.0), ticket.live_writers()) == (State.RECEIVED, True, [])
    assert (ticket.num_bytes, ticket.bytes_before_end) == (150, 120)


def test_a_report_that_comes_twice_counts_once():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.report(wrote(LEFT, 100), 1.0)
    assert ticket.report(wrote(LEFT, 100), 1.0)
    assert ticket.report(failed(LEFT), 1.0)
    assert (ticket.state, ticket.num_bytes) == (State.OPEN, 100)


def test_one_writer_alone_is_not_enough():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    ticket.tick(DEADLINE)
    assert (ticket.state, ticket.reason) == (State.FAILED, "the transfer took too long")


def test_a_tensor_needs_all_its_writers():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT, (1,)), 0.0)  # not tensor 2, of which LEFT brings other heads
    ticket.report(wrote(LEFT), 1.0)
    ticket.report(wrote(RIGHT), 1.0)
    assert ticket.state is State.OPEN


def test_a_writer_that_fails_fails_the_ticket():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    assert ticket.report(failed(RIGHT), 1.0)
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 1: it broke")
    assert not ticket.quiet(1.0)  # the other one may still write
    assert ticket.report(wrote(LEFT), 1.0)
    assert ticket.state is State.FAILED
    assert ticket.quiet(1.0)


def test_a_writer_that_goes_silent():
    ticket = opened()
    ticket.grant(asks(LEFT), 5.0)
    ticket.tick(5.0 + LEASE_S)  # a write begun at the lease's end may still be under way
    assert ticket.state is State.OPEN
    ticket.tick(5.0 + LEASE_S + SETTLE_S)
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 0 of engine prefill-0 went silent")
    assert ticket.quiet(5.0 + LEASE_S + SETTLE_S)


def test_each_writer_says_how_long_it_may_outlast_its_lease():
    ticket = opened()
    ticket.grant(asks(LEFT, settle_s=0.0), 0.0)
    ticket.grant(asks(RIGHT, settle_s=20.0), 0.0)
    ticket.tick(LEASE_S)
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 0 of engine prefill-0 went silent")
    assert not ticket.quiet(LEASE_S + 19.9)
    assert ticket.quiet(LEASE_S + 20.0)


def test_bytes_of_a_failed_write_may_still_arrive():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 0: it broke")
    assert ticket.live_writers() == []  # nothing to revoke
    assert not ticket.quiet(4.9)
    assert ticket.quiet(5.0)


def test_a_repeated_report_does_not_settle_anew():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    assert ticket.report(failed(LEFT, settle_s=4.0), 4.0)
    assert ticket.report(failed(LEFT), 4.0)  # nor is it over sooner
    assert not ticket.quiet(4.9)
    assert ticket.quiet(5.0)


def test_settling_after_another_writer_failed():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    ticket.report(failed(RIGHT), 1.0)
    assert ticket.report(failed(LEFT, settle_s=4.0), 2.0)
    assert ticket.reason == "prefill rank 1: it broke"
    assert not ticket.quiet(5.9)
    assert ticket.quiet(6.0)


def test_a_renewal_extends_the_lease():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.grant(asks(LEFT), 9.0) == Granted(LEASE_S)
    ticket.tick(9.0 + LEASE_S)
    assert ticket.state is State.OPEN


def test_nobody_came():
    ticket = opened()
    ticket.tick(DEADLINE - 0.1)
    assert ticket.state is State.OPEN
    ticket.tick(DEADLINE)
    assert (ticket.state, ticket.reason) == (State.FAILED, "nothing was received")
    assert ticket.quiet(DEADLINE)


def test_no_grant_after_the_deadline_even_if_nobody_looked_at_the_clock():
    ticket = opened()
    assert ticket.grant(asks(LEFT), DEADLINE) == Refused("the ticket is failed nothing was received", retry=False)
    assert ticket.quiet(DEADLINE)


def test_no_renewal_of_a_lease_that_ran_out():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    answer = ticket.grant(asks(LEFT), LEASE_S + SETTLE_S)
    assert isinstance(answer, Refused)
    assert "went silent" in answer.reason


def test_prefill_ended_without_asking_to_write():
    ticket = opened()
    ticket.prefill_has_ended(5.0)
    ticket.tick(4.9)
    assert ticket.state is State.OPEN
    ticket.tick(5.0)
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill ended without writing everything")
    assert ticket.quiet(5.0)


def test_prefill_ended_and_its_writers_are_still_at_it():
    ticket = opened()
    ticket.prefill_has_ended(5.0)
    ticket.grant(asks(LEFT), 4.0)
    ticket.tick(6.0)
    assert ticket.state is State.OPEN
    assert ticket.grant(asks(RIGHT), 6.0) == Granted(LEASE_S)
    ticket.report(wrote(RIGHT), 7.0)
    ticket.report(wrote(LEFT), 7.0)
    ticket.tick(8.0)
    assert ticket.state is State.RECEIVED


def test_prefill_ended_and_one_writer_never_came():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.prefill_has_ended(5.0)
    ticket.report(wrote(LEFT), 1.0)
    answer = ticket.grant(asks(RIGHT), 5.0)
    assert answer == Refused("the ticket is failed prefill ended without writing everything", retry=False)


def test_an_open_ticket_is_never_quiet():
    """It has no lease yet, or none any more, but may give one at any time."""
    ticket = opened()
    assert not ticket.quiet(0.0)
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.quiet(LEASE_S + SETTLE_S)


def test_a_cancelled_ticket_waits_for_its_writers():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.fail("the request was aborted")
    assert not ticket.quiet(LEASE_S + SETTLE_S - 0.1)
    assert ticket.quiet(LEASE_S + SETTLE_S)
    assert ticket.grant(asks(LEFT), 1.0) == Refused("the ticket is failed the request was aborted", retry=False)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (asks(LEFT, attempt=1), "altered or is of another attempt"),
        (asks(LEFT, digest="e" * 32), "altered or is of another attempt"),
        (asks(LEFT, sharding=sharding(4)), "another prefill engine"),
        (asks(STRANGER, (0,)), "another prefill engine"),
        (asks(LEFT, (0, 1)), "not its to write"),
        (asks(LEFT, (0, 2, 3)), "not its to write"),
        (asks(LEFT, (-1,)), "not its to write"),
        (asks(Writer("prefill-0", 0, 2), (0,)), "not its to write"),
    ],
)
def test_requests_that_are_refused(request_, complaint):
    ticket = opened()
    answer = ticket.grant(request_, 0.0)
    assert isinstance(answer, Refused)
    assert complaint in answer.reason
    assert not answer.retry
    assert ticket.live_writers() == []


def test_a_renewal_covers_what_the_grant_covered():
    ticket = opened()
    ticket.grant(asks(LEFT, (0,)), 0.0)
    assert isinstance(ticket.grant(asks(LEFT, (0, 2)), 1.0), Refused)
    assert ticket.grant(asks(LEFT, (0,)), 1.0) == Granted(LEASE_S)


def test_a_tensor_has_one_writer_of_each_rank():
    """Two stages cannot both bring a layer: what one has claimed or written the other must not touch."""
    ticket = opened()
    ticket.grant(asks(LEFT, (0,)), 0.0)
    refused = Refused("the writer covers tensors that are not its to write", retry=False)
    assert ticket.grant(asks(TWIN, (0,)), 0.0) == refused
    assert ticket.grant(asks(TWIN, (0, 2)), 0.0) == refused
    assert ticket.grant(asks(TWIN, (2,)), 0.0) == Granted(LEASE_S)
    ticket.report(wrote(TWIN), 1.0)
    assert ticket.grant(asks(Writer("prefill-0", 2, 0), (2,)), 1.0) == refused
    assert ticket.live_writers() == [LEFT]


def test_no_grant_after_a_report():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    assert ticket.grant(asks(LEFT), 1.0) == Refused("this writer has already reported", retry=False)


def test_reports_that_are_not_believed():
    ticket = opened()
    assert not ticket.report(wrote(LEFT), 1.0)  # never granted
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.report(msgspec.structs.replace(wrote(LEFT), attempt=1), 1.0)
    assert not ticket.report(msgspec.structs.replace(failed(LEFT), attempt=1), 1.0)
    assert (ticket.state, ticket.live_writers()) == (State.OPEN, [LEFT])


def test_a_writer_without_a_grant_may_say_that_it_cannot():
    ticket = opened()
    assert ticket.report(failed(RIGHT, "the layouts do not fit"), 1.0)
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 1: the layouts do not fit")


def test_a_stranger_cannot_fail_the_ticket():
    ticket = opened()
    assert not ticket.report(failed(STRANGER), 1.0)
    assert (ticket.state, ticket.engine_known) == (State.OPEN, True)


def test_anyone_may_say_that_it_cannot_before_the_engine_is_known():
    ticket = ConsumerTicket(TICKET_ID, 0, DIGEST, DEADLINE, LEASE_S)
    assert not ticket.report(wrote(STRANGER), 1.0)
    assert ticket.report(failed(STRANGER, "models differ"), 1.0)
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 0: models differ")
    assert ticket.quiet(1.0)
