# SPDX-License-Identifier: Apache-2.0
"""A decode rank's ticket under any order of events."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tickets import (
    DEADLINE,
    EXPECTED,
    LEASE_S,
    LEFT,
    RIGHT,
    SETTLE_S,
    STRANGER,
    TWIN,
    asks,
    failed,
    opened,
    wrote,
)

from vllm_ascend_pd.core.decode_ticket import TicketState
from vllm_ascend_pd.core.protocol import Granted, GrantRefused, WriterId
from vllm_ascend_pd.core.topology import sharding


@dataclass
class Lease:
    """What a writer knows.

    It may write `covers` until the lease `ends`. By `until` none of its bytes can arrive any more, unless its process
    is stopped. It has `settled` when it says so, or when it has ended and `until` is over.
    """

    covers: tuple[int, ...]
    settle_s: float
    ends: float
    until: float
    settled: bool = False
    ended: bool = False

    def can_write(self, now: float) -> bool:
        return not self.settled and not (self.ended and now >= self.until)


WRITERS = st.sampled_from([LEFT, RIGHT, TWIN])
COVERED = st.sampled_from([None, None, None, (0,), (2,), (), (0, 1), (1,), (0, 2, 2)])
SECONDS = st.sampled_from([0.0, 0.5, 1.0, SETTLE_S, LEASE_S - 1, LEASE_S, LEASE_S + SETTLE_S, 25.0])
SETTLING = st.sampled_from([0.0, 0.5, SETTLE_S, 2 * SETTLE_S])
LONGEST_SETTLE_S = 2 * SETTLE_S
ENDED = (TicketState.RECEIVED, TicketState.FAILED)


class AnyOrder(RuleBasedStateMachine):
    """Three writers that report honestly, over a network that loses, repeats and reorders messages."""

    @initialize(queue_deadline=st.sampled_from([5.0, DEADLINE]), transfer_s=st.sampled_from([5.0, DEADLINE]))
    def open(self, queue_deadline, transfer_s):
        self.ticket = opened(queue_deadline, transfer_s)
        self.now = 0.0
        self.leases: dict[WriterId, Lease] = {}
        self.reported: set[WriterId] = set()
        self.believed: set[tuple[int, int]] = set()  # pairs in reports of success that were believed
        self.something_failed = False
        self.was_quiet = False
        self.ended: tuple[TicketState, str] | None = None

    @rule(writer=WRITERS, covers=COVERED, settle_s=SETTLING)
    def ask(self, writer, covers, settle_s):
        request = asks(writer, covers, settle_s=settle_s)
        answer = self.ticket.grant(request, self.now)
        if isinstance(answer, GrantRefused):
            assert not answer.retry
            return
        assert answer == Granted(LEASE_S)
        assert not self.was_quiet
        assert self.ended is None
        assert not self.something_failed
        assert writer not in self.reported
        assert self.now < self.ticket.deadline
        assert {(tensor, writer.rank) for tensor in request.covers} <= EXPECTED
        if writer in self.leases:
            assert set(self.leases[writer].covers) == set(request.covers)
        for other, lease in self.leases.items():
            if other != writer and other.rank == writer.rank:
                assert not set(lease.covers) & set(request.covers)
        self.leases[writer] = Lease(request.covers, settle_s, self.now + LEASE_S, self.now + LEASE_S + settle_s)

    @rule(
        writer=WRITERS,
        wrong=st.sampled_from([{"digest": "e"}, {"sharding": sharding(1)}, {"writer": STRANGER}]),
    )
    def ask_wrongly(self, writer, wrong):
        assert isinstance(self.ticket.grant(asks(writer, **wrong), self.now), GrantRefused)

    @rule(writer=WRITERS)
    def report_success(self, writer):
        open_before = self.ticket.state is TicketState.OPEN
        believed = self.ticket.report(wrote(writer), self.now)
        assert believed == (writer in self.leases)
        if believed:
            if writer not in self.reported and open_before:
                self.believed |= {(tensor, writer.rank) for tensor in self.leases[writer].covers}
            self.reported.add(writer)
            self.leases[writer].settled = True

    @precondition(lambda self: not self.was_quiet)  # nobody remembers a ticket for longer
    @rule(writer=WRITERS, settle_s=SETTLING)
    def report_failure(self, writer, settle_s):
        open_before = self.ticket.state is TicketState.OPEN
        assert self.ticket.report(failed(writer, settle_s=settle_s), self.now)
        first = writer not in self.reported
        if writer in self.leases:
            self.reported.add(writer)
            self.leases[writer].ended = False
            if settle_s == 0:
                self.leases[writer].settled = True
            elif first:
                self.leases[writer].until = self.now + settle_s
        if first:
            if open_before:
                assert self.ticket.state is TicketState.FAILED
            self.something_failed = True

    @rule(writer=WRITERS)
    def is_gone(self, writer):
        self.ticket.gone(writer, self.now)
        lease = self.leases.get(writer)
        if lease is not None and not lease.ended:
            lease.ended = True
            lease.until = max(lease.until, self.now + lease.settle_s)

    @rule(reason=st.sampled_from([None, "it broke"]), settle_s=SETTLING)
    def report_of_a_stranger(self, reason, settle_s):
        report = wrote(STRANGER) if reason is None else failed(STRANGER, reason, settle_s)
        assert not self.ticket.report(report, self.now)

    @rule(seconds=SECONDS)
    def prefill_ends(self, seconds):
        self.ticket.prefill_has_ended(self.now, seconds)

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
        if self.ticket.state is TicketState.OPEN:
            assert self.now < self.ticket.deadline
            assert all(writer in self.reported or self.now < lease.ends for writer, lease in self.leases.items())

    @invariant()
    def received_means_received(self):
        """R1 holds, and a complete ticket is received at once."""
        if self.ticket.state is TicketState.RECEIVED:
            assert self.believed == EXPECTED
        if self.ticket.state is TicketState.OPEN:
            assert self.believed < EXPECTED
            assert not self.something_failed

    @invariant()
    def quiet_means_quiet(self):
        """R2 holds."""
        if self.ticket.is_quiesced(self.now):
            self.was_quiet = True
            assert self.ticket.state in ENDED
            assert not any(lease.can_write(self.now) for lease in self.leases.values())
        else:
            assert not self.was_quiet
            if self.ticket.state in ENDED:  # nor are blocks kept for longer than needed
                assert any(lease.can_write(self.now) for lease in self.leases.values())
        assert set(self.ticket.live_writers()) == self.leases.keys() - self.reported
        overdue = {w for w, lease in self.leases.items() if lease.can_write(self.now) and self.now >= lease.until}
        assert set(self.ticket.overdue(self.now)) == overdue

    @invariant()
    def the_end_is_final(self):
        if self.ended is not None:
            assert (self.ticket.state, self.ticket.reason) == self.ended
        elif self.ticket.state in ENDED:
            self.ended = (self.ticket.state, self.ticket.reason)
            assert bool(self.ticket.reason) == (self.ticket.state is TicketState.FAILED)

    def teardown(self):
        """R4 holds: the ticket ends, and its blocks can be released when its writers have ended."""
        if not hasattr(self, "ticket"):
            return
        self.ticket.tick(max(self.now, self.ticket.deadline))
        assert self.ticket.state in ENDED
        for writer in self.leases:
            self.ticket.gone(writer, self.now)
        assert self.ticket.is_quiesced(max(self.now, 2 * DEADLINE, self.ticket.deadline) + LEASE_S + LONGEST_SETTLE_S)


AnyOrder.TestCase.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase
