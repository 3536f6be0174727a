# SPDX-License-Identifier: Apache-2.0
"""Grant requests that a decode rank's ticket refuses, and reports that it does not believe."""

import msgspec
import pytest
from tickets import (
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

from vllm_ascend_pd.core.decode_ticket import MAX_ATTEMPTS, DecodeTicket, TicketState
from vllm_ascend_pd.core.protocol import Granted, GrantRefused, WriterId
from vllm_ascend_pd.core.topology import sharding


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
    assert not ticket.report(msgspec.structs.replace(wrote(LEFT), attempt=1), 1.0)
    assert not ticket.report(msgspec.structs.replace(failed(LEFT), attempt=1), 1.0)
    assert (ticket.state, ticket.live_writers()) == (TicketState.OPEN, [LEFT])


def test_a_writer_without_a_grant_may_report_failure():
    ticket = opened()
    assert ticket.report(failed(RIGHT, "the layouts do not fit"), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FENCING, "prefill rank 1: the layouts do not fit")


def test_a_stranger_cannot_fail_the_ticket():
    ticket = opened()
    assert not ticket.report(failed(STRANGER), 1.0)
    assert (ticket.state, ticket.engine_known) == (TicketState.OPEN, True)


def test_any_writer_may_report_failure_before_the_engine_is_known():
    ticket = DecodeTicket(TICKET_ID, 0, DIGEST, DEADLINE, DEADLINE, LEASE_S)
    assert not ticket.report(wrote(STRANGER), 1.0)
    assert ticket.report(failed(STRANGER, "models differ"), 1.0)
    assert (ticket.state, ticket.reason) == (TicketState.FENCING, "prefill rank 0: models differ")
    ticket.fail("prefill answered 502")
    assert ticket.is_quiesced(1.0)
