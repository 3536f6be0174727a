# SPDX-License-Identifier: Apache-2.0
"""What a decode rank makes of grant requests, reports and time."""

import msgspec
import pytest
from tickets import (
    COVERS,
    DEADLINE,
    DIGEST,
    EXPECTED,
    LEASE_S,
    LEFT,
    P_TP,
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

from vllm_ascend_pd.core.decode_ticket import MAX_ATTEMPTS, DecodeTicket, TicketState
from vllm_ascend_pd.core.protocol import Complete, Granted, GrantRefused, WriteReport, WriterId
from vllm_ascend_pd.core.topology import sharding

NOBODY_BEGAN = (
    "no prefill engine began within queue_timeout_s: the prompt waited in the proxy's line or in prefill's queue"
)


def test_both_writers_write_and_the_ticket_is_received():
    ticket = opened()
    assert ticket.grant(asks(LEFT), 0.0) == ticket.grant(asks(RIGHT), 0.0) == Granted(LEASE_S)
    assert ticket.live_writers() == [LEFT, RIGHT]
    assert ticket.report(wrote(LEFT, 100, 70), 1.0)
    assert (ticket.state, ticket.is_quiesced(1.0), ticket.live_writers()) == (TicketState.OPEN, False, [RIGHT])
    assert ticket.report(wrote(RIGHT, 50, 50), 1.0)
    assert (ticket.state, ticket.is_quiesced(1.0), ticket.live_writers()) == (TicketState.RECEIVED, True, [])
    assert (ticket.num_bytes, ticket.bytes_before_end) == (150, 120)


def test_the_least_that_was_cached_counts_of_all_reports():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    assert ticket.cached_tokens is None
    ticket.report(msgspec.structs.replace(wrote(LEFT), cached_tokens=64), 1.0)
    assert ticket.cached_tokens == 64
    ticket.report(msgspec.structs.replace(wrote(RIGHT), cached_tokens=32), 1.0)
    assert (ticket.state, ticket.cached_tokens) == (TicketState.RECEIVED, 32)


def test_what_a_failed_attempt_had_to_compute_is_not_cached_for_the_next():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    ticket.report(msgspec.structs.replace(failed(LEFT), cached_tokens=16), 1.0)
    ticket.report(failed(RIGHT), 1.0)  # as a rank that has forgotten the transfer
    second = asks(LEFT, attempt=1)
    assert ticket.admit(second, 2.0) is None
    ticket.expect("prefill-0", P_TP, frozenset({(0, 0), (2, 0)}))
    ticket.grant(second, 2.0)
    ticket.report(msgspec.structs.replace(wrote(LEFT), attempt=1, cached_tokens=96), 3.0)
    assert (ticket.state, ticket.cached_tokens) == (TicketState.RECEIVED, 16)


def test_an_engine_that_does_not_say_what_it_had_cached_counts_as_one_that_had_nothing():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    assert ticket.cached_tokens == 0


def test_a_report_that_is_not_believed_says_nothing_of_the_cache():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.report(msgspec.structs.replace(wrote(STRANGER), cached_tokens=1), 1.0)
    assert not ticket.report(msgspec.structs.replace(wrote(LEFT), attempt=3, cached_tokens=1), 1.0)
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


def test_a_writer_that_fails_fails_the_attempt():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    assert ticket.report(failed(RIGHT), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FENCING, "prefill rank 1: it broke")
    assert ticket.live_writers() == [LEFT]
    assert ticket.grant(asks(LEFT), 1.0) == GrantRefused("attempt 0 is over: prefill rank 1: it broke", retry=False)
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
    assert (ticket.state, ticket.reason) == (TicketState.FENCING, "prefill rank 0 of engine prefill-0 went silent")


def test_blocks_are_kept_for_a_writer_whose_process_is_stopped():
    """It goes on where it was, whenever that is, and with it the bytes it was sending."""
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
    """What it sent then has its time."""
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


def test_who_comes_back_on_another_connection_is_not_gone():
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


def test_each_writer_says_how_long_it_may_outlast_its_lease():
    ticket = opened()
    ticket.grant(asks(LEFT, settle_s=0.0), 0.0)
    ticket.grant(asks(RIGHT, settle_s=20.0), 0.0)
    ticket.tick(LEASE_S)
    assert (ticket.state, ticket.reason) == (TicketState.FENCING, "prefill rank 0 of engine prefill-0 went silent")
    assert (ticket.overdue(LEASE_S + 19.9), ticket.overdue(LEASE_S + 20.0)) == ([LEFT], [LEFT, RIGHT])


def test_bytes_of_a_failed_write_may_still_arrive():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FENCING, "prefill rank 0: it broke")
    ticket.fail("prefill answered 502")
    assert ticket.live_writers() == []  # nothing to revoke
    assert not ticket.is_quiesced(1.0)
    assert ticket.report(failed(LEFT), 3.0)
    assert ticket.is_quiesced(3.0)


def test_a_repeated_report_does_not_settle_anew():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    assert ticket.report(failed(LEFT, settle_s=4.0), 4.0)
    assert (ticket.overdue(4.9), ticket.overdue(5.0)) == ([], [LEFT])


def test_success_and_failure_of_one_transfer():
    """Whoever says both is believed what it says first."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    ticket.report(failed(LEFT, settle_s=4.0), 1.0)
    ticket.report(wrote(LEFT), 2.0)
    ticket.report(wrote(RIGHT), 2.0)
    assert (ticket.state, ticket.num_bytes) == (TicketState.FENCING, 0)


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


# Attempts.


def again(writer=LEFT, attempt=1, **changes):
    """Another transfer of the rank asks."""
    other = msgspec.structs.replace(writer, transfer=100 + attempt)
    return asks(other, COVERS[writer], attempt=attempt, **changes)


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
    """Also where that looked alive: prefill may be known to be dead elsewhere first."""
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


def test_the_highest_attempt_has_its_turn():
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
    """The same ticket came to it twice: the second finds the first's place taken, and cannot end it."""
    ticket = opened()
    twice = msgspec.structs.replace(RIGHT, transfer=5)
    ticket.grant(asks(RIGHT), 0.0)
    for covers in (COVERS[RIGHT], ()):
        assert "in another transfer" in ticket.grant(asks(twice, covers), 0.0).reason
    assert not ticket.report(failed(twice), 1.0)
    assert not ticket.report(wrote(twice), 1.0)
    assert (ticket.state, ticket.live_writers()) == (TicketState.OPEN, [RIGHT])


def test_who_asks_for_what_has_been_received_need_not_write():
    ticket = opened()
    for writer in (LEFT, RIGHT):
        ticket.grant(asks(writer), 0.0)
        ticket.report(wrote(writer), 1.0)
    assert ticket.state is TicketState.RECEIVED
    assert ticket.grant(again(), 2.0) == Complete()
    assert isinstance(ticket.grant(again(digest="e" * 32), 2.0), GrantRefused)


def test_no_other_attempt_comes():
    """The proxy takes no notice of failures: it says that prefill has ended, and that is all."""
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


# Time.


def test_a_renewal_extends_the_lease():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.grant(asks(LEFT), 9.0) == Granted(LEASE_S)
    ticket.tick(9.0 + LEASE_S - 0.1)
    assert ticket.state is TicketState.OPEN


def test_nobody_came():
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
    """Of one of two writers, from its first request on."""
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


def test_a_ticket_whose_attempt_failed_waits_in_a_queue_again():
    ticket = opened(queue_deadline=1000.0, transfer_s=60.0)
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(failed(LEFT), 1.0)
    ticket.tick(900.0)
    assert ticket.state is TicketState.FENCING
    assert ticket.admit(again(), 900.0) is None
    ticket.tick(959.9)
    assert ticket.state is TicketState.OPEN
    ticket.tick(960.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "the transfer took too long")


def test_only_who_has_the_ticket_begins():
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


def test_prefill_ended_and_its_writers_are_still_at_it():
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


def test_an_open_ticket_is_never_quiet():
    """It has no lease yet, or none any more, but may give one at any time."""
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


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (asks(LEFT, attempt=MAX_ATTEMPTS), "at most 16"),
        (asks(LEFT, digest="e" * 32), "altered"),
        (asks(LEFT, sharding=sharding(4)), "another prefill engine"),
        (asks(STRANGER, (0,)), "another prefill engine"),
        (asks(LEFT, (0, 1)), "it must not write"),
        (asks(LEFT, (0, 2, 3)), "it must not write"),
        (asks(LEFT, (-1,)), "it must not write"),
        (asks(WriterId("prefill-0", 0, 2), (0,)), "it must not write"),
    ],
)
def test_requests_that_are_refused(request_, complaint):
    ticket = opened()
    answer = ticket.grant(request_, 0.0)
    assert isinstance(answer, GrantRefused)
    assert complaint in answer.reason
    assert not answer.retry
    assert ticket.live_writers() == []


def test_a_renewal_covers_what_the_grant_covered():
    ticket = opened()
    ticket.grant(asks(LEFT, (0,)), 0.0)
    assert isinstance(ticket.grant(asks(LEFT, (0, 2)), 1.0), GrantRefused)
    assert ticket.grant(asks(LEFT, (0,)), 1.0) == Granted(LEASE_S)


def test_a_tensor_has_one_writer_of_each_rank():
    """Two stages cannot both bring a layer: what one has claimed or written the other must not touch."""
    ticket = opened()
    ticket.grant(asks(LEFT, (0,)), 0.0)
    refused = GrantRefused("the writer covers tensors that it must not write", retry=False)
    assert ticket.grant(asks(TWIN, (0,)), 0.0) == refused
    assert ticket.grant(asks(TWIN, (0, 2)), 0.0) == refused
    assert ticket.grant(asks(TWIN, (2,)), 0.0) == Granted(LEASE_S)
    ticket.report(wrote(TWIN), 1.0)
    assert ticket.grant(asks(WriterId("prefill-0", 2, 0), (2,)), 1.0) == refused
    assert ticket.live_writers() == [LEFT]


def test_no_grant_after_a_report():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    assert ticket.grant(asks(LEFT), 1.0) == GrantRefused("this writer has already reported", retry=False)


def test_reports_that_are_not_believed():
    ticket = opened()
    assert not ticket.report(wrote(LEFT), 1.0)  # never granted
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.report(msgspec.structs.replace(wrote(LEFT), attempt=1), 1.0)
    assert not ticket.report(msgspec.structs.replace(failed(LEFT), attempt=1), 1.0)
    assert (ticket.state, ticket.live_writers()) == (TicketState.OPEN, [LEFT])


def test_a_writer_without_a_grant_may_say_that_it_cannot():
    ticket = opened()
    assert ticket.report(failed(RIGHT, "the layouts do not fit"), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FENCING, "prefill rank 1: the layouts do not fit")


def test_a_stranger_cannot_fail_the_ticket():
    ticket = opened()
    assert not ticket.report(failed(STRANGER), 1.0)
    assert (ticket.state, ticket.engine_known) == (TicketState.OPEN, True)


def test_anyone_may_say_that_it_cannot_before_the_engine_is_known():
    ticket = DecodeTicket(TICKET_ID, 0, DIGEST, DEADLINE, DEADLINE, LEASE_S)
    assert not ticket.report(wrote(STRANGER), 1.0)
    assert ticket.report(failed(STRANGER, "models differ"), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FENCING, "prefill rank 0: models differ")
    ticket.fail("prefill answered 502")
    assert ticket.is_quiesced(1.0)
