# SPDX-License-Identifier: Apache-2.0
"""A decode rank's ticket: which grants, reports and leases make it received or failed, what it refuses and does not
believe, its deadlines, and when writers are done."""

import msgspec
import pytest

from vllm_ascend_pd.core.decode_ticket import DecodeTicket, TicketState
from vllm_ascend_pd.core.protocol import Granted, GrantRefused, GrantRequest, WriteReport, WriterId
from vllm_ascend_pd.core.topology import sharding

TICKET_ID = "0123456789abcdef" * 2
LEASE_S = 10.0
SETTLE_S = 3.0
DEADLINE = 60.0
DIGEST = "d" * 32
P_TP = sharding(2)

# Two prefill stages of two ranks would be four writers; two suffice: one brings tensors 0 and 2, the other 1 and 2.
LEFT = WriterId("prefill-0", 0, 0)
RIGHT = WriterId("prefill-0", 1, 1)
TWIN = WriterId("prefill-0", 1, 0)  # LEFT's tensor-parallel rank in the other stage
COVERS = {LEFT: (0, 2), RIGHT: (1, 2), TWIN: (2,)}
EXPECTED = frozenset({(0, 0), (2, 0), (1, 1), (2, 1)})
STRANGER = WriterId("prefill-9", 0, 0)


def opened(queue_deadline: float = DEADLINE, transfer_s: float = DEADLINE) -> DecodeTicket:
    ticket = DecodeTicket(TICKET_ID, DIGEST, queue_deadline, transfer_s, LEASE_S)
    ticket.expect("prefill-0", P_TP, EXPECTED)
    assert not ticket.is_owned
    return ticket


def asks(writer: WriterId, covers: tuple[int, ...] | None = None, /, **changes: object) -> GrantRequest:
    request = GrantRequest(TICKET_ID, DIGEST, writer, P_TP, COVERS[writer] if covers is None else covers, SETTLE_S)
    return msgspec.structs.replace(request, **changes)


def wrote(writer: WriterId, num_bytes: int = 0, bytes_before_end: int = 0) -> WriteReport:
    return WriteReport(TICKET_ID, writer, None, num_bytes, bytes_before_end)


def failed(writer: WriterId, reason: str = "it broke", settle_s: float = 0.0) -> WriteReport:
    return WriteReport(TICKET_ID, writer, reason, settle_s=settle_s)


@pytest.mark.parametrize(("other", "least"), [(32, 32), (128, 64), (None, 0)])
def test_the_smallest_cached_count_of_all_reports_counts(other, least):
    """An engine that does not say what it had cached counts as one that had nothing."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    assert ticket.cached_tokens is None
    ticket.report(msgspec.structs.replace(wrote(LEFT), cached_tokens=64), 1.0)
    assert ticket.cached_tokens == 64
    ticket.report(msgspec.structs.replace(wrote(RIGHT), cached_tokens=other), 1.0)
    assert (ticket.state, ticket.cached_tokens) == (TicketState.RECEIVED, least)


def test_a_report_that_is_repeated_counts_once():
    ticket = opened()
    for writer in (LEFT, RIGHT):
        ticket.grant(asks(writer), 0.0)
        for _ in range(2):
            assert ticket.report(wrote(writer, 1000, 800), 1.0)
    assert (ticket.num_bytes, ticket.bytes_before_end) == (2000, 1600)
    assert ticket.report(failed(LEFT), 1.0)
    assert ticket.state is TicketState.RECEIVED


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


def test_a_lease_that_ends_without_a_report_fails_the_ticket():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    ticket.tick(LEASE_S - 0.1)
    assert ticket.state is TicketState.OPEN
    ticket.tick(LEASE_S)
    assert ticket.state is TicketState.FAILED
    assert ticket.reason.startswith("prefill rank 1 of engine prefill-0")


def test_a_writer_that_has_reported_gets_no_further_grant():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    ticket.tick(2 * LEASE_S)
    assert ticket.state is TicketState.OPEN
    assert isinstance(ticket.grant(asks(LEFT), 2.0), GrantRefused)


def test_all_reports_of_a_ticket_that_has_failed_do_not_make_it_received():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    assert not ticket.is_quiesced(1e6)
    ticket.fail("cancelled")
    for writer in (LEFT, RIGHT):
        assert ticket.report(wrote(writer, 1000), 1.0)
    assert (ticket.state, ticket.num_bytes) == (TicketState.FAILED, 0)


def test_a_writer_may_report_failure_before_it_asks():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.report(failed(RIGHT), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 1: it broke")


@pytest.mark.parametrize("first", ["report", "lease", "cancelled"])
def test_whether_prefill_has_reported_the_failure_itself(first):
    """Only then is it known to be alive. What is said after the failure changes nothing."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    if first == "report":
        ticket.report(failed(LEFT), 1.0)
    elif first == "lease":
        ticket.tick(LEASE_S + SETTLE_S)
    else:
        ticket.fail("cancelled")
    ticket.report(failed(RIGHT), 2.0)
    ticket.report(failed(LEFT), 2.0)
    assert (ticket.state, ticket.failed_by_prefill) == (TicketState.FAILED, first == "report")


@pytest.mark.parametrize(
    ("seen", "free"), [((1.0,), LEASE_S + SETTLE_S), ((100.0, 101.0), 100.0 + SETTLE_S)], ids=["during", "after"]
)
def test_a_process_that_ends_during_or_after_its_lease(seen, free):
    """Blocks are kept for as long as those of one that goes on, and for bytes that it sent when it went on later."""
    ticket = opened()
    ticket.gone(RIGHT, 0.0)  # which has no grant
    ticket.grant(asks(LEFT), 0.0)
    ticket.fail("the request was aborted")
    for now in seen:
        ticket.gone(LEFT, now)
    assert not ticket.is_quiesced(free - 0.1)
    assert ticket.is_quiesced(free)


def test_blocks_are_kept_for_a_writer_whose_process_is_stopped():
    """It may be resumed at any time, and then sends the rest of its bytes."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.fail("the request was aborted")
    over = LEASE_S + SETTLE_S
    assert (ticket.is_quiesced(1e6), ticket.overdue(over - 0.1), ticket.overdue(over)) == (False, [], [LEFT])
    assert ticket.report(failed(LEFT, settle_s=4.0), 1e6)
    assert ticket.report(failed(LEFT, settle_s=4.0), 1e6 + 2.0), "a repetition, which prolongs nothing"
    assert (ticket.is_quiesced(1e6 + 4.0), ticket.overdue(1e6), ticket.overdue(1e6 + 4.0)) == (False, [], [LEFT])
    assert ticket.report(failed(LEFT), 1e6 + 4.0)
    assert (ticket.is_quiesced(1e6 + 4.0), ticket.overdue(1e6 + 4.0)) == (True, [])


def test_a_message_shows_that_a_process_has_not_ended():
    """Its connection was closed, and it has another one."""
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.gone(LEFT, 1.0)
    assert isinstance(ticket.grant(asks(LEFT), 2.0), Granted)
    ticket.fail("the request was aborted")
    assert not ticket.is_quiesced(1e6)


# Over time: renewals, deadlines, the wait in a queue, and the end of prefill.

NOBODY_BEGAN = "no prefill engine began within queue_timeout_s: the prompt waited in the proxy's queue or in prefill's"


def test_no_prefill_rank_asked_before_the_deadline():
    ticket = opened()
    ticket.tick(DEADLINE - 0.1)
    assert ticket.state is TicketState.OPEN
    ticket.tick(DEADLINE)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, NOBODY_BEGAN)
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


def test_prefill_ended_without_asking_to_write():
    ticket = opened()
    ticket.prefill_has_ended(0.0, 5.0)
    ticket.tick(4.9)
    assert ticket.state is TicketState.OPEN
    ticket.tick(5.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill ended without writing everything")
    assert ticket.is_quiesced(5.0)


def test_prefill_ended_and_one_writer_never_came():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.prefill_has_ended(0.0, 5.0)
    ticket.tick(5.0)
    assert ticket.state is TicketState.OPEN, "one writer still writes"
    ticket.report(wrote(LEFT), 6.0)
    answer = ticket.grant(asks(RIGHT), 6.0)
    assert answer == GrantRefused("the ticket is failed: prefill ended without writing everything", retry=False)


# What is refused, and what is not believed.


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
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
    """Two pipeline stages cannot both write a layer: a stage must not touch what the other one covers."""
    ticket = opened()
    ticket.grant(asks(LEFT, (0,)), 0.0)
    refused = GrantRefused("the writer covers tensors that it must not write", retry=False)
    assert ticket.grant(asks(TWIN, (0,)), 0.0) == refused
    assert ticket.grant(asks(TWIN, (0, 2)), 0.0) == refused
    assert ticket.grant(asks(TWIN, (2,)), 0.0) == Granted(LEASE_S)
    ticket.report(wrote(TWIN), 1.0)
    assert ticket.grant(asks(WriterId("prefill-0", 2, 0), (2,)), 1.0) == refused
    assert ticket.live_writers() == [LEFT]


def test_any_writer_may_report_failure_before_the_engine_is_known():
    ticket = DecodeTicket(TICKET_ID, DIGEST, DEADLINE, DEADLINE, LEASE_S)
    assert not ticket.report(wrote(STRANGER), 1.0)
    assert ticket.report(failed(STRANGER, "models differ"), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 0: models differ")
    ticket.fail("prefill answered 502")
    assert ticket.is_quiesced(1.0)


def test_a_rank_has_one_transfer_of_a_ticket():
    """A rank that got the same ticket twice has two transfers. The second one is refused, and cannot end the first."""
    ticket = opened()
    twice = msgspec.structs.replace(RIGHT, transfer=5)
    ticket.grant(asks(RIGHT), 0.0)
    for covers in (COVERS[RIGHT], ()):
        assert "in another transfer" in ticket.grant(asks(twice, covers), 0.0).reason
    assert not ticket.report(failed(twice), 1.0)
    assert not ticket.report(wrote(twice), 1.0)
    assert (ticket.state, ticket.live_writers()) == (TicketState.OPEN, [RIGHT])


def test_the_engine_that_is_granted_first_owns_the_ticket():
    """An engine that asked before, and was refused, does not (R10)."""
    ticket = opened()
    assert isinstance(ticket.grant(asks(LEFT, (0, 1)), 0.0), GrantRefused)
    ticket.expect("prefill-9", sharding(1), frozenset((tensor, 0) for tensor in range(3)))
    request = asks(STRANGER, (0, 1, 2), sharding=sharding(1))
    assert ticket.grant(request, 0.0) == Granted(LEASE_S)
    assert "another prefill engine" in ticket.grant(asks(LEFT), 1.0).reason
    assert not ticket.report(failed(LEFT), 1.0)
    assert ticket.state is TicketState.OPEN
    ticket.report(failed(STRANGER), 2.0)
    assert ticket.grant(asks(LEFT), 3.0) == GrantRefused("the ticket is failed: prefill rank 0: it broke", retry=False)
