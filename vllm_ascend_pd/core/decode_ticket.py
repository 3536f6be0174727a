# SPDX-License-Identifier: Apache-2.0
"""A ticket as a decode rank sees it: who may write, has everything arrived, may its blocks be given back?

The decode side's state machine, one per decode rank and ticket:

    OPEN --every writer wrote everything--> RECEIVED
      |---a writer failed, its lease ran out, a higher attempt asks--> FENCING
    FENCING --no writer of the attempt can write any more, a higher one asks--> OPEN
    OPEN, FENCING --cancelled, deadline, prefill ended without writing everything--> FAILED
    RECEIVED and FAILED are final; blocks may be released when no writer can still write (`quiet`).

The deadline depends on what the ticket waits for. Until a writer of the attempt asks for a grant, the prompt is in a
queue for prefill, and the ticket may wait until `queue_deadline`. From the first request on, the attempt has
`transfer_s`. A failed attempt leaves the ticket in a queue again.

A writer holds a lease from its grant until it reports. Rule R2: a granted writer can write until it has reported that
it stopped and that nothing of it is on its way, or until its lease has passed, with it the time that bytes may take to
arrive, and its process has ended: one that is stopped for longer goes on where it was.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_ascend_pd.core.protocol import Complete, Granted, GrantRefused, GrantRequest, WriteReport, WriterId
from vllm_ascend_pd.core.topology import Sharding

# What a rank remembers of tickets it has closed, so that late requests are refused, not asked to retry.
MAX_TOMBSTONES = 16384
# More writers than any prefill engine has ranks: bounds what grant requests can make us remember.
MAX_WRITERS = 4096
MAX_ATTEMPTS = 16

_WAITED = "no prefill engine began within queue_timeout_s: the prompt waited in the proxy's line or in prefill's queue"

# A writer of a higher attempt asks again and again: one that has within this time still waits for its grant.
_WAITS_S = 5.0


class TicketState(enum.Enum):
    OPEN = "open"
    FENCING = "fencing"
    RECEIVED = "received"
    FAILED = "failed"


@dataclass
class _Lease:
    """`ends`: a writer that runs has renewed it by then. `until`: by then a writer that runs, or has ended, has
    stopped, and what it sent has arrived. `reported`: it begins no write any more; `settled`: and nothing of it is on
    its way; `gone`: its process has ended."""

    covers: frozenset[int]
    settle_s: float
    ends: float
    until: float
    reported: bool = False
    settled: bool = False
    gone: bool = False

    def is_over(self, now: float) -> bool:
        return self.settled or (self.gone and now >= self.until)


class _PrefillEnd(NamedTuple):
    """When prefill ended, and for how long from then on writers may still come."""

    at: float
    settle_s: float


@dataclass
class DecodeTicket:
    """What a decode rank knows of a ticket. Times are seconds of one monotonic clock, passed in.

    `queue_deadline`: when an attempt must have begun; `transfer_s`: how long one may take from then on;
    `attempt`: the one that writes, or wrote last; `lease_s`: how long a grant lasts; each writer says how long a write
    begun within it may outlast it; `reason`: what the attempt, or the ticket, failed of first; `cached_tokens`: the
    least that any report said, of whichever attempt: what one of them has computed was computed for this request.
    """

    ticket_id: str
    attempt: int
    digest: str
    queue_deadline: float
    transfer_s: float
    lease_s: float
    state: TicketState = TicketState.OPEN
    reason: str = ""
    num_bytes: int = 0
    bytes_before_end: int = 0
    cached_tokens: int | None = None
    _begun_at: float | None = None  # when a writer of the attempt first asked; None while FENCING
    _next: int = 0  # while FENCING: no lower attempt is granted any more
    _asked_at: float = -math.inf  # when a higher attempt last did
    _prefill_end: _PrefillEnd | None = None
    _engine: tuple[str, Sharding] | None = None
    _leases: dict[WriterId, _Lease] = field(default_factory=dict)
    _missing: frozenset[tuple[int, int]] = frozenset()  # which tickets of equal shapes share until a writer reports

    @property
    def engine_known(self) -> bool:
        """Of this attempt."""
        return self._engine is not None

    @property
    def deadline(self) -> float:
        """When it fails unless something else happens first."""
        return self.queue_deadline if self._begun_at is None else self._begun_at + self.transfer_s

    def expect(self, engine_id: str, sharding: Sharding, expected: frozenset[tuple[int, int]]) -> None:
        """Fixes who must write what: pairs (index of our tensor, rank of the writer in its pipeline stage)."""
        assert self.state is TicketState.OPEN
        assert self._engine is None
        self._engine = (engine_id, sharding)
        self._missing = expected

    def admit(self, request: GrantRequest, now: float) -> GrantRefused | Complete | None:
        """Whether the request's attempt may write at all: None, or the answer. A higher attempt than the one that
        writes has its turn when no writer of that can write any more."""
        self.tick(now)
        if request.digest != self.digest:
            return GrantRefused("the ticket was altered", retry=False)
        if self.state is TicketState.RECEIVED:
            return Complete()
        if self.state is TicketState.FAILED:
            return GrantRefused(f"the ticket is failed: {self.reason}", retry=False)
        if request.attempt >= MAX_ATTEMPTS:
            return GrantRefused(f"attempt {request.attempt}: a ticket has at most {MAX_ATTEMPTS}", retry=False)
        if self.state is TicketState.OPEN:
            if request.attempt == self.attempt:
                self._begun_at = now if self._begun_at is None else self._begun_at
                return None
            if request.attempt > self.attempt:
                self._fence(f"attempt {request.attempt} began before it had ended")
        if request.attempt < self._next:
            return GrantRefused(f"attempt {request.attempt} is over: {self.reason}", retry=False)
        self._next, self._asked_at = request.attempt, now
        if not self._silent(now):
            return GrantRefused(f"attempt {self.attempt} may still write: {self.reason}", retry=True, wait_s=_WAITS_S)
        self._begin(request.attempt, now)
        return None

    def grant(self, request: GrantRequest, now: float) -> Granted | GrantRefused | Complete:
        """Decides a grant request, or a renewal. `expect` must have been called for the request's attempt."""
        if (answer := self.admit(request, now)) is not None:
            return answer
        writer = request.writer
        if self._engine != (writer.engine_id, request.sharding):
            return GrantRefused("another prefill engine is writing for this ticket", retry=False)
        lease = self._leases.get(writer)
        if lease is not None and lease.reported:
            return GrantRefused("this writer has already reported", retry=False)
        covers = frozenset(request.covers)
        if lease is not None and lease.covers != covers:
            return GrantRefused("a renewal must cover what the grant covered", retry=False)
        ends = now + self.lease_s
        until = ends + request.settle_s
        if lease is None:
            if self._has_other(writer) or len(self._leases) == MAX_WRITERS:
                return GrantRefused(
                    "this prefill rank is or was writing for the ticket in another transfer", retry=False
                )
            claimed = {(t, w.rank) for w, other in self._leases.items() for t in other.covers}
            if not {(tensor, writer.rank) for tensor in covers} <= self._missing - claimed:
                return GrantRefused("the writer covers tensors that are not its to write", retry=False)
            self._leases[writer] = _Lease(covers, request.settle_s, ends, until)
        else:
            lease.ends, lease.until, lease.settle_s = ends, until, request.settle_s
            lease.gone = False
        return Granted(self.lease_s)

    def report(self, report: WriteReport, now: float) -> bool:
        """A writer has stopped; with `settle_s`, it reports again when nothing of it is on its way any more. Returns
        False for a report that is not to be believed.

        A writer that was never granted anything may say that it cannot serve the ticket, nothing else.
        """
        lease = self._leases.get(report.writer)
        if report.attempt != self.attempt:
            return False
        if lease is None:
            stranger = self._engine is not None and self._engine[0] != report.writer.engine_id
            if report.reason is None or stranger or self._has_other(report.writer):
                return False
            self._note_cached(report)
            self._fence(f"prefill rank {report.writer.rank}: {report.reason}")
            return True
        first = not lease.reported
        lease.reported, lease.gone = True, False
        self._note_cached(report)
        if report.settle_s == 0:
            lease.settled = True
        elif first:
            lease.until = now + report.settle_s
        if not first or self.state is not TicketState.OPEN:
            return True
        if report.reason is not None:
            self._fence(f"prefill rank {report.writer.rank}: {report.reason}")
            return True
        self.num_bytes += report.num_bytes
        self.bytes_before_end += report.bytes_before_end
        self._missing -= {(tensor, report.writer.rank) for tensor in lease.covers}
        if not self._missing:
            self.state = TicketState.RECEIVED
        return True

    def gone(self, writer: WriterId, now: float) -> None:
        """A writer's connection is closed. Its process has ended; else it says so by what it sends next. It may have
        been stopped until just before, so what it sent last is given its time from now on."""
        lease = self._leases.get(writer)
        if lease is not None and not lease.gone:
            lease.gone = True
            lease.until = max(lease.until, now + lease.settle_s)

    def fail(self, reason: str) -> None:
        """Final unless the ticket already ended. Why an attempt was given up explains more than what came of it."""
        if self.state in (TicketState.OPEN, TicketState.FENCING):
            self.state = TicketState.FAILED
            self.reason = self.reason or reason

    def prefill_has_ended(self, now: float, settle_s: float) -> None:
        """Whoever wants to write has asked for it by now, or will within `settle_s`; else nobody will."""
        self._prefill_end = _PrefillEnd(now, settle_s)

    def tick(self, now: float) -> None:
        """Lets time pass: a writer whose lease ran out is lost, and so is a ticket past its deadline."""
        end = self._prefill_end
        if self.state is TicketState.OPEN:
            lost = [w for w, lease in self._leases.items() if not lease.reported and now >= lease.ends]
            if lost:
                self._fence(f"prefill rank {lost[0].rank} of engine {lost[0].engine_id} went silent")
            elif now >= self.deadline:
                self.fail(_WAITED if self._begun_at is None else "the transfer took too long")
            elif end is not None and now >= end.at + end.settle_s and not self.live_writers():
                self.fail("prefill ended without writing everything")
        if self.state is TicketState.FENCING:
            # Ranks of another attempt ask when it begins, and go on asking: none does, so prefill ended with this one.
            over = end is not None and now >= end.at + min(end.settle_s, _WAITS_S)
            if now >= self.deadline or (over and now >= self._asked_at + _WAITS_S):
                self.fail(self.reason)

    def quiet(self, now: float) -> bool:
        """The ticket has ended, and nothing that was granted under it can write any more."""
        return self.state in (TicketState.RECEIVED, TicketState.FAILED) and self._silent(now)

    def live_writers(self) -> list[WriterId]:
        """Those that may begin a write, as far as they have said."""
        return [w for w, lease in self._leases.items() if not lease.reported]

    def overdue(self, now: float) -> list[WriterId]:
        """Those whose time has passed, but whose process may go on where it was stopped."""
        return [w for w, lease in self._leases.items() if now >= lease.until and not lease.is_over(now)]

    def _silent(self, now: float) -> bool:
        return all(lease.is_over(now) for lease in self._leases.values())

    def _has_other(self, writer: WriterId) -> bool:
        """Whether the same rank was granted something in another transfer of this attempt."""
        rank = (writer.engine_id, writer.pp_rank, writer.rank)
        return any((w.engine_id, w.pp_rank, w.rank) == rank for w in self._leases if w != writer)

    def _note_cached(self, report: WriteReport) -> None:
        if report.cached_tokens is None and report.reason is not None:  # perhaps of a transfer that P has forgotten
            return
        tokens = report.cached_tokens or 0
        self.cached_tokens = tokens if self.cached_tokens is None else min(self.cached_tokens, tokens)

    def _fence(self, reason: str) -> None:
        """The attempt has failed: what it was granted is taken back."""
        if self.state is TicketState.OPEN:
            self.state = TicketState.FENCING
            self.reason = reason
            self._begun_at = None
            self._next = self.attempt + 1

    def _begin(self, attempt: int, now: float) -> None:
        """Everything is to be written again, by whoever comes."""
        self.state, self.attempt, self.reason = TicketState.OPEN, attempt, ""
        self._begun_at = now
        self.num_bytes = self.bytes_before_end = 0
        self._engine = None
        self._leases.clear()
        self._missing = frozenset()
        if self._prefill_end is not None:
            self._prefill_end = self._prefill_end._replace(at=now)
