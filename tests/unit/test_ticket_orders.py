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
    TICKET_ID,
    TWIN,
    asks,
    failed,
    opened,
    wrote,
)

from vllm_ascend_pd.core.protocol import Granted, Refused, Report, Writer
from vllm_ascend_pd.core.ticket import State
from vllm_ascend_pd.core.topology import sharding


@dataclass
class Lease:
    """What the writer knows: it may write `covers`, and by `until` nothing of it can arrive any more."""

    covers: tuple[int, ...]
    until: float


WRITERS = st.sampled_from([LEFT, RIGHT, TWIN])
COVERED = st.sampled_from([None, None, None, (0,), (2,), (), (0, 1), (1,), (0, 2, 2)])
SECONDS = st.sampled_from([0.0, 0.5, 1.0, SETTLE_S, LEASE_S - 1, LEASE_S, LEASE_S + SETTLE_S, 25.0])
SETTLING = st.sampled_from([0.0, 0.5, SETTLE_S, 2 * SETTLE_S])
LONGEST_SETTLE_S = 2 * SETTLE_S


class AnyOrder(RuleBasedStateMachine):
    """Three writers, honest about their own state, over a network that loses, repeats and reorders."""

    @initialize(deadline=st.sampled_from([5.0, DEADLINE]))
    def open(self, deadline):
        self.ticket = opened(deadline)
        self.now = 0.0
        self.leases: dict[Writer, Lease] = {}
        self.reported: set[Writer] = set()
        self.believed: set[tuple[int, int]] = set()  # pairs in reports of success that were believed
        self.something_failed = False
        self.was_quiet = False
        self.settle_by: float | None = None
        self.ended: tuple[State, str] | None = None

    @rule(writer=WRITERS, covers=COVERED, settle_s=SETTLING)
    def ask(self, writer, covers, settle_s):
        request = asks(writer, covers, settle_s=settle_s)
        answer = self.ticket.grant(request, self.now)
        if isinstance(answer, Refused):
            assert not answer.retry
            return
        assert answer == Granted(LEASE_S)
        assert not self.was_quiet
        assert self.ended is None
        assert writer not in self.reported
        assert self.now < self.ticket.deadline
        assert {(tensor, writer.rank) for tensor in request.covers} <= EXPECTED
        if writer in self.leases:
            assert set(self.leases[writer].covers) == set(request.covers)
        for other, lease in self.leases.items():
            if other != writer and other.rank == writer.rank:
                assert not set(lease.covers) & set(request.covers)
        self.leases[writer] = Lease(request.covers, self.now + LEASE_S + settle_s)

    @rule(
        writer=WRITERS,
        wrong=st.sampled_from([{"attempt": 1}, {"digest": "e"}, {"sharding": sharding(1)}, {"writer": STRANGER}]),
    )
    def ask_wrongly(self, writer, wrong):
        assert isinstance(self.ticket.grant(asks(writer, **wrong), self.now), Refused)

    @rule(writer=WRITERS)
    def report_success(self, writer):
        open_before = self.ticket.state is State.OPEN
        believed = self.ticket.report(wrote(writer), self.now)
        assert believed == (writer in self.leases)
        if believed and writer not in self.reported:
            self.reported.add(writer)
            self.leases[writer].until = 0.0
            if open_before:
                self.believed |= {(tensor, writer.rank) for tensor in self.leases[writer].covers}

    @precondition(lambda self: not self.was_quiet)  # nobody remembers a ticket for longer
    @rule(writer=WRITERS, settle_s=SETTLING)
    def report_failure(self, writer, settle_s):
        open_before = self.ticket.state is State.OPEN
        assert self.ticket.report(failed(writer, settle_s=settle_s), self.now)
        if writer in self.reported:
            return
        if writer in self.leases:
            self.reported.add(writer)
            self.leases[writer].until = self.now + settle_s
        if open_before:
            assert self.ticket.state is State.FAILED
        self.something_failed = True

    @rule(writer=WRITERS, reason=st.sampled_from([None, "it broke"]))
    def report_of_another_attempt(self, writer, reason):
        assert not self.ticket.report(Report(TICKET_ID, 1, writer, reason), self.now)

    @rule(reason=st.sampled_from([None, "it broke"]), settle_s=SETTLING)
    def report_of_a_stranger(self, reason, settle_s):
        assert not self.ticket.report(Report(TICKET_ID, 0, STRANGER, reason, settle_s=settle_s), self.now)

    @rule(seconds=SECONDS)
    def prefill_ends(self, seconds):
        self.settle_by = self.now + seconds
        self.ticket.prefill_has_ended(self.settle_by)

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
        if self.ticket.state is State.OPEN:
            assert self.now < self.ticket.deadline
            assert all(writer in self.reported or self.now < lease.until for writer, lease in self.leases.items())
            someone_writes = self.leases.keys() - self.reported
            assert someone_writes or self.settle_by is None or self.now < self.settle_by

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
            assert all(self.now >= lease.until for lease in self.leases.values())
        else:
            assert not self.was_quiet
            if self.ticket.state is not State.OPEN:  # nor are blocks kept for longer than needed
                assert any(self.now < lease.until for lease in self.leases.values())
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
        assert self.ticket.quiet(max(self.now, self.ticket.deadline) + LEASE_S + LONGEST_SETTLE_S)


AnyOrder.TestCase.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase
