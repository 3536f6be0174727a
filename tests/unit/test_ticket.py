# SPDX-License-Identifier: Apache-2.0
"""What prefill accepts as a ticket, and what a decode rank makes of grant requests, reports and time."""

import json
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_ascend_pd.core.protocol import Granted, GrantRequest, Refused, Report, Writer
from vllm_ascend_pd.core.ticket import ConsumerTicket, State, Ticket, TicketError, parse_ticket, salt_of

# --- the ticket in kv_transfer_params ------------------------------------------------------------------------

TICKET_ID = "0123456789abcdef" * 2
PARAMS = {
    "request_id": "chatcmpl-1",
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "token_ids": [],
    "remote_block_ids": [[7, 3, 9]],
    "remote_block_size": [4],
    "remote_engine_id": "decode-0",
    "remote_host": "10.0.0.1",
    "remote_port": 5555,
    "remote_tp_size": 2,
    "remote_pcp_size": 1,
    "remote_dcp_size": 1,
    "remote_cached_tokens": 4,
    "ticket_id": TICKET_ID,
    "attempt": 0,
    "num_tokens": 10,
}
TWO_GROUPS = {**PARAMS, "remote_block_ids": [[7, 3, 9], [1, 2]], "remote_block_size": [4, 8], "remote_cached_tokens": 8}
REQUIRED = (
    "request_id",
    "remote_block_ids",
    "remote_block_size",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_tp_size",
    "remote_cached_tokens",
    "ticket_id",
    "num_tokens",
)


def test_a_ticket_comes_back_as_it_was_sent():
    sent = Ticket(**PARAMS)
    received = parse_ticket(json.loads(json.dumps(msgspec.to_builtins(sent))), 10, 1)
    assert received == sent
    assert received.digest() == sent.digest()
    assert received.endpoint == "tcp://10.0.0.1:5555"


def test_fields_of_others_are_left_alone():
    assert parse_ticket({**PARAMS, "metaserver": "http://proxy/v1/metaserver", "x": None}, 10, 1) == Ticket(**PARAMS)


def test_a_ticket_per_cache_group():
    assert parse_ticket(TWO_GROUPS, 10, 2).remote_block_ids == [[7, 3, 9], [1, 2]]


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_cached_tokens": 0},
        {"remote_cached_tokens": 8},
        {"num_tokens": 10, "remote_block_ids": [[7, 3, 9, 11]]},  # more blocks than the prompt needs
        {"remote_port": 1},
        {"remote_port": 65535},
        {"remote_block_ids": [[0, 2**31 - 1, 1]]},
    ],
    ids=str,
)
def test_what_is_accepted(changes):
    ticket = parse_ticket({**PARAMS, **changes}, 10, 1)
    assert {name: getattr(ticket, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        *(({field: None}, "not a ticket") for field in REQUIRED),
        ({"ticket_id": TICKET_ID[:-1]}, "ticket_id"),
        ({"ticket_id": TICKET_ID + "0"}, "ticket_id"),
        ({"ticket_id": TICKET_ID.upper()}, "ticket_id"),
        ({"ticket_id": "g" * 32}, "ticket_id"),
        ({"ticket_id": "٣" * 32}, "ticket_id"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": -1}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_port": "5555"}, "remote_port"),
        ({"remote_tp_size": 0}, "remote_tp_size"),
        ({"num_tokens": 9}, "the ticket is for 9 prompt tokens, the prompt has 10"),
        ({"num_tokens": 11}, "the ticket is for 11 prompt tokens, the prompt has 10"),
        ({"num_tokens": True}, "num_tokens"),
        ({"remote_block_ids": []}, "0 cache groups, this engine has 1"),
        ({"remote_block_ids": [[7, 3, 9]] * 2, "remote_block_size": [4] * 2}, "2 cache groups, this engine has 1"),
        ({"remote_block_size": [4, 4]}, "cache groups"),
        ({"remote_block_ids": [7, 3, 9]}, r"remote_block_ids\[0\]"),
        ({"remote_block_ids": [[7, 3]]}, "2 blocks of 4 for 10 tokens"),
        ({"remote_block_ids": [[]]}, "0 blocks of 4 for 10 tokens"),
        ({"remote_block_ids": [[7, -3, 9]]}, r"remote_block_ids\[0\]\[1\]"),
        ({"remote_block_ids": [[7, 3.0, 9]]}, r"remote_block_ids\[0\]\[1\]"),
        ({"remote_block_ids": [[7, 2**31, 9]]}, r"remote_block_ids\[0\]\[1\]"),
        ({"remote_block_ids": [[7, 2**64, 9]]}, r"remote_block_ids\[0\]\[1\]"),
        ({"remote_block_size": [0], "remote_cached_tokens": 0}, "remote_block_size 0"),
        ({"remote_block_size": [-4]}, r"remote_block_size\[0\]"),
        ({"remote_block_size": [2**64], "remote_cached_tokens": 0}, r"remote_block_size\[0\]"),
        ({"remote_cached_tokens": 3}, "does not fit remote_cached_tokens"),
        ({"remote_cached_tokens": 12}, "remote_cached_tokens 12 is out of range"),
        ({"remote_cached_tokens": -4}, "remote_cached_tokens"),
        ({"attempt": -1}, "attempt"),
        ({"attempt": 2**64}, "attempt"),
        ({"remote_pcp_size": 2}, "context parallelism"),
        ({"remote_dcp_size": 2}, "context parallelism"),
    ],
    ids=str,
)
def test_what_is_refused(changes, complaint):
    with pytest.raises(TicketError, match=complaint):
        parse_ticket({**PARAMS, **changes}, 10, 1)


@pytest.mark.parametrize("field", REQUIRED)
def test_no_field_may_be_missing(field):
    with pytest.raises(TicketError, match=field):
        parse_ticket({name: value for name, value in PARAMS.items() if name != field}, 10, 1)


@pytest.mark.parametrize("params", [None, [], "ticket", 1, {}, {1: 2}, object()], ids=repr)
def test_what_is_not_a_ticket_at_all(params):
    with pytest.raises(TicketError, match="kv_transfer_params is not a ticket"):
        parse_ticket(params, 10, 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(PARAMS)), JSON, max_size=4), st.booleans())
def test_whatever_passes_can_be_used(changes, replaces):
    """A client's JSON raises nothing but TicketError, then or later."""
    params = {**PARAMS, **changes} if replaces else changes
    try:
        ticket = parse_ticket(params, 10, 1)
    except TicketError:
        return
    assert len(ticket.digest()) == 32
    assert ticket.salt >= 0


@pytest.mark.parametrize(
    "changes",
    [
        {"ticket_id": "f" * 32},
        {"attempt": 1},
        {"remote_engine_id": "decode-1"},
        {"remote_cached_tokens": 0},
        {"num_tokens": 9},
        {"remote_block_ids": [[7, 3, 8]]},
        {"remote_block_ids": [[3, 7, 9]]},
        {"remote_block_ids": [[7, 3, 9, 0]]},
        {"remote_block_ids": [[7, 3], [9]]},
        {"remote_block_size": [8]},
    ],
    ids=str,
)
def test_the_digest_changes_with(changes):
    assert Ticket(**{**PARAMS, **changes}).digest() != Ticket(**PARAMS).digest()


@pytest.mark.parametrize("changes", [{"request_id": "cmpl-2"}, {"remote_host": "decode"}, {"token_ids": [1]}], ids=str)
def test_the_digest_does_not_change_with(changes):
    assert Ticket(**{**PARAMS, **changes}).digest() == Ticket(**PARAMS).digest()


def test_salt_is_drawn_from_the_ticket_id():
    assert salt_of("00000010" + "f" * 24) == 16
    assert Ticket(**PARAMS).salt == salt_of(TICKET_ID) == 0x01234567


# --- the decode rank's side ----------------------------------------------------------------------------------

LEASE_S = 10.0
WRITE_S = 3.0
DEADLINE = 60.0
DIGEST = "d" * 32
P_TP = 2

# Two prefill stages of two ranks would be four writers; two suffice: one brings tensors 0 and 2, the other 1 and 2.
LEFT = Writer("prefill-0", 0, 0)
RIGHT = Writer("prefill-0", 1, 1)
COVERS = {LEFT: (0, 2), RIGHT: (1, 2)}
EXPECTED = frozenset({(0, 0), (2, 0), (1, 1), (2, 1)})
STRANGER = Writer("prefill-9", 0, 0)


def opened(deadline: float = DEADLINE) -> ConsumerTicket:
    ticket = ConsumerTicket(TICKET_ID, 0, DIGEST, deadline, LEASE_S, WRITE_S)
    assert not ticket.engine_known
    ticket.expect("prefill-0", P_TP, EXPECTED)
    assert ticket.engine_known
    return ticket


def asks(writer: Writer, covers: tuple[int, ...] | None = None, /, **changes: object) -> GrantRequest:
    request = GrantRequest(TICKET_ID, 0, DIGEST, writer, P_TP, COVERS[writer] if covers is None else covers)
    return msgspec.structs.replace(request, **changes)


def wrote(writer: Writer, num_bytes: int = 0, bytes_before_end: int = 0) -> Report:
    return Report(TICKET_ID, 0, writer, None, num_bytes, bytes_before_end)


def failed(writer: Writer, reason: str = "it broke") -> Report:
    return Report(TICKET_ID, 0, writer, reason)


def test_both_writers_write_and_the_ticket_is_received():
    ticket = opened()
    assert ticket.grant(asks(LEFT), 0.0) == ticket.grant(asks(RIGHT), 0.0) == Granted(LEASE_S)
    assert ticket.live_writers() == [LEFT, RIGHT]
    assert ticket.report(wrote(LEFT, 100, 70))
    assert (ticket.state, ticket.quiet(1.0), ticket.live_writers()) == (State.OPEN, False, [RIGHT])
    assert ticket.report(wrote(RIGHT, 50, 50))
    assert (ticket.state, ticket.quiet(1.0), ticket.live_writers()) == (State.RECEIVED, True, [])
    assert (ticket.num_bytes, ticket.bytes_before_end) == (150, 120)


def test_a_report_that_comes_twice_counts_once():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    assert ticket.report(wrote(LEFT, 100))
    assert ticket.report(wrote(LEFT, 100))
    assert ticket.report(failed(LEFT))
    assert (ticket.state, ticket.num_bytes) == (State.OPEN, 100)


def test_one_writer_alone_is_not_enough():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT))
    ticket.tick(DEADLINE)
    assert (ticket.state, ticket.reason) == (State.FAILED, "the transfer took too long")


def test_a_tensor_needs_all_its_writers():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT, (1,)), 0.0)  # not tensor 2, of which LEFT brings other heads
    ticket.report(wrote(LEFT))
    ticket.report(wrote(RIGHT))
    assert ticket.state is State.OPEN


def test_a_writer_that_fails_fails_the_ticket():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.grant(asks(RIGHT), 0.0)
    assert ticket.report(failed(RIGHT))
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 1: it broke")
    assert not ticket.quiet(1.0)  # the other one may still write
    assert ticket.report(wrote(LEFT))
    assert ticket.state is State.FAILED
    assert ticket.quiet(1.0)


def test_a_writer_that_goes_silent():
    ticket = opened()
    ticket.grant(asks(LEFT), 5.0)
    ticket.tick(5.0 + LEASE_S)  # a write begun at the lease's end may still be under way
    assert ticket.state is State.OPEN
    ticket.tick(5.0 + LEASE_S + WRITE_S)
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 0 of engine prefill-0 went silent")
    assert ticket.quiet(5.0 + LEASE_S + WRITE_S)


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


def test_an_open_ticket_is_never_quiet():
    """It has no lease yet, or none any more, but may give one at any time."""
    ticket = opened()
    assert not ticket.quiet(0.0)
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.quiet(LEASE_S + WRITE_S)


def test_a_cancelled_ticket_waits_for_its_writers():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.fail("the request was aborted")
    assert not ticket.quiet(LEASE_S + WRITE_S - 0.1)
    assert ticket.quiet(LEASE_S + WRITE_S)
    assert ticket.grant(asks(LEFT), 1.0) == Refused("the ticket is failed the request was aborted", retry=False)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (asks(LEFT, attempt=1), "altered or is of another attempt"),
        (asks(LEFT, digest="e" * 32), "altered or is of another attempt"),
        (asks(LEFT, tp=4), "another prefill engine"),
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


def test_no_grant_after_a_report():
    ticket = opened()
    ticket.grant(asks(LEFT), 0.0)
    ticket.report(wrote(LEFT))
    assert ticket.grant(asks(LEFT), 1.0) == Refused("this writer has already reported", retry=False)


def test_reports_that_are_not_believed():
    ticket = opened()
    assert not ticket.report(wrote(LEFT))  # never granted
    ticket.grant(asks(LEFT), 0.0)
    assert not ticket.report(msgspec.structs.replace(wrote(LEFT), attempt=1))
    assert not ticket.report(msgspec.structs.replace(failed(LEFT), attempt=1))
    assert (ticket.state, ticket.live_writers()) == (State.OPEN, [LEFT])


def test_a_writer_without_a_grant_may_say_that_it_cannot():
    ticket = opened()
    assert ticket.report(failed(RIGHT, "the layouts do not fit"))
    assert (ticket.state, ticket.reason) == (State.FAILED, "prefill rank 1: the layouts do not fit")


# --- any order of events -------------------------------------------------------------------------------------


class Lease(NamedTuple):
    """What the writer knows: it may write `covers`, beginning no write after `until`."""

    covers: tuple[int, ...]
    until: float


WRITERS = st.sampled_from([LEFT, RIGHT])
SECONDS = st.sampled_from([0.0, 0.5, 1.0, WRITE_S, LEASE_S - 1, LEASE_S, LEASE_S + WRITE_S, 25.0])


class AnyOrder(RuleBasedStateMachine):
    """Two writers, both honest about their own state, over a network that loses, repeats and reorders."""

    @initialize(deadline=st.sampled_from([5.0, DEADLINE]))
    def open(self, deadline):
        self.ticket = opened(deadline)
        self.now = 0.0
        self.leases: dict[Writer, Lease] = {}
        self.reported: set[Writer] = set()
        self.believed: set[tuple[int, int]] = set()  # pairs in reports of success that were believed
        self.something_failed = False
        self.was_quiet = False
        self.ended: tuple[State, str] | None = None

    @rule(writer=WRITERS, covers=st.sampled_from([None, None, None, (0,), (2,), (), (0, 1), (1,), (0, 2, 2)]))
    def ask(self, writer, covers):
        request = asks(writer, covers)
        answer = self.ticket.grant(request, self.now)
        if isinstance(answer, Refused):
            assert not answer.retry
            return
        assert answer == Granted(LEASE_S)
        assert not self.was_quiet
        assert self.ended is None
        assert writer not in self.reported
        assert {(tensor, writer.tp_rank) for tensor in request.covers} <= EXPECTED
        if writer in self.leases:
            assert set(self.leases[writer].covers) == set(request.covers)
        self.leases[writer] = Lease(request.covers, self.now + LEASE_S)

    @rule(writer=WRITERS, wrong=st.sampled_from([{"attempt": 1}, {"digest": "e"}, {"tp": 1}, {"writer": STRANGER}]))
    def ask_wrongly(self, writer, wrong):
        assert isinstance(self.ticket.grant(asks(writer, **wrong), self.now), Refused)

    @rule(writer=WRITERS)
    def report_success(self, writer):
        open_before = self.ticket.state is State.OPEN
        believed = self.ticket.report(wrote(writer))
        assert believed == (writer in self.leases)
        if believed and writer not in self.reported:
            self.reported.add(writer)
            if open_before:
                self.believed |= {(tensor, writer.tp_rank) for tensor in self.leases[writer].covers}

    @rule(writer=WRITERS)
    def report_failure(self, writer):
        open_before = self.ticket.state is State.OPEN
        assert self.ticket.report(failed(writer))
        if writer in self.reported:
            return
        if writer in self.leases:
            self.reported.add(writer)
        if open_before:
            assert self.ticket.state is State.FAILED
        self.something_failed = True

    @rule(writer=WRITERS, reason=st.sampled_from([None, "it broke"]))
    def report_of_another_attempt(self, writer, reason):
        assert not self.ticket.report(Report(TICKET_ID, 1, writer, reason))

    @precondition(lambda self: self.now > 0)
    @rule()
    def cancel(self):
        self.ticket.fail("cancelled")

    @rule(seconds=SECONDS)
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def tick(self):
        self.ticket.tick(self.now)
        assert self.ticket.state is not State.OPEN or self.now < self.ticket.deadline

    @invariant()
    def received_means_received(self):
        """R1, and its reverse: nothing that is complete is held up."""
        if self.ticket.state is State.RECEIVED:
            assert self.believed == EXPECTED
        if self.ticket.state is State.OPEN:
            assert self.believed < EXPECTED
            assert not self.something_failed

    @invariant()
    def quiet_means_quiet(self):
        """R2."""
        if self.ticket.quiet(self.now):
            self.was_quiet = True
            assert self.ticket.state is not State.OPEN
            for writer, lease in self.leases.items():
                assert writer in self.reported or self.now >= lease.until + WRITE_S
        else:
            assert not self.was_quiet
        assert set(self.ticket.live_writers()) == self.leases.keys() - self.reported

    @invariant()
    def the_end_is_final(self):
        if self.ended is not None:
            assert (self.ticket.state, self.ticket.reason) == self.ended
        elif self.ticket.state is not State.OPEN:
            self.ended = (self.ticket.state, self.ticket.reason)
            assert bool(self.ticket.reason) == (self.ticket.state is State.FAILED)

    def teardown(self):
        """R4: whatever happened, it ends, and its blocks can be released a lease later."""
        if not hasattr(self, "ticket"):
            return
        self.ticket.tick(max(self.now, self.ticket.deadline))
        assert self.ticket.state is not State.OPEN
        assert self.ticket.quiet(max(self.now, self.ticket.deadline) + LEASE_S + WRITE_S)


AnyOrder.TestCase.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase
