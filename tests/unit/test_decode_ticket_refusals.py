# SPDX-License-Identifier: Apache-2.0
"""Grant requests that a decode rank's ticket refuses, and reports that it does not believe."""

import msgspec
import pytest
from tickets import (
    COVERS,
    DEADLINE,
    DIGEST,
    LEASE_S,
    LEFT,
    RIGHT,
    STRANGER,
    TICKET_ID,
    TWIN,
    asks,
    failed,
    opened,
    wrote,
)

from vllm_ascend_pd.core.decode_ticket import DecodeTicket, TicketState
from vllm_ascend_pd.core.protocol import Granted, GrantRefused, WriterId
from vllm_ascend_pd.core.topology import sharding


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


def test_no_grant_after_a_report():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT), 1.0)
    assert ticket.grant(asks(LEFT), 1.0) == GrantRefused("this writer has already reported", retry=False)


def test_reports_that_are_not_believed():
    ticket = opened()
    assert not ticket.report(wrote(LEFT), 1.0)  # never granted
    ticket.grant(asks(LEFT), 0.0)
    other = msgspec.structs.replace(LEFT, transfer=1)
    assert not ticket.report(wrote(other), 1.0)
    assert not ticket.report(failed(other), 1.0)
    assert (ticket.state, ticket.live_writers()) == (TicketState.OPEN, [LEFT])


def test_a_writer_without_a_grant_may_report_failure():
    ticket = opened()
    assert ticket.report(failed(RIGHT, "the layouts do not fit"), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FAILED, "prefill rank 1: the layouts do not fit")


def test_a_stranger_cannot_fail_the_ticket():
    ticket = opened()
    assert not ticket.report(failed(STRANGER), 1.0)
    assert ticket.state is TicketState.OPEN


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
    ticket.report(failed(STRANGER), 2.0)
    assert ticket.grant(asks(LEFT), 3.0) == GrantRefused("the ticket is failed: prefill rank 0: it broke", retry=False)


def test_a_writer_that_asks_after_everything_was_received_is_refused():
    ticket = opened()
    for writer in (LEFT, RIGHT):
        ticket.grant(asks(writer), 0.0)
        ticket.report(wrote(writer), 1.0)
    assert ticket.grant(asks(STRANGER, (0,)), 2.0) == GrantRefused(
        "the ticket is received: all KV is here", retry=False
    )
    assert ticket.is_quiesced(2.0)
