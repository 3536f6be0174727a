# SPDX-License-Identifier: Apache-2.0
"""A ticket on a decode rank: which writers may write, whether everything has arrived, when its blocks are free.

The decode side's state machine, one per decode rank and ticket:

    OPEN --every writer wrote everything--> RECEIVED
    OPEN --a writer failed or its lease ran out, cancelled, deadline, prefill ended without writing--> FAILED
    RECEIVED and FAILED are final. Blocks may be released when no writer can write any more (`is_quiesced`).

The first prefill engine that is granted a write owns the ticket (R10). Every other engine is refused.

The deadline depends on what the ticket waits for. Until a writer asks for a grant, the prompt is in a queue for
prefill, and the ticket may wait until `queue_deadline`. From the first request on, the transfer has `transfer_s`.

A writer holds a lease from its grant until it reports. A granted writer can write (R2) until one of these:

- It has reported that it stopped, and that no byte of it is in flight.
- Its process has ended, its lease has passed, and so has the time that bytes in flight may take. The end of the process
  is needed, because a stopped process goes on where it was.

If this rank's own process was stopped, bytes that came meanwhile lie in its socket buffers. They count as in flight for
some time after it has gone on.
"""

import enum
import math
from dataclasses import dataclass, field

from vllm_ascend_pd.core.protocol import Granted, GrantRefused, GrantRequest, WriteReport, WriterId
from vllm_ascend_pd.core.topology import Sharding

MAX_TOMBSTONES = 16384
"""Closed tickets that a rank remembers, so that it refuses late requests instead of asking them to retry."""
MAX_WRITERS = 4096
"""More writers than any prefill engine has ranks. It limits what grant requests can make a rank remember."""

_WAITED = "no prefill engine began within queue_timeout_s: the prompt waited in the proxy's queue or in prefill's"


class TicketState(enum.Enum):
    # Writers of one prefill engine may write.
    OPEN = "open"
    # Everything has arrived.
    RECEIVED = "received"
    # The KV will not arrive.
    FAILED = "failed"


@dataclass
class _Lease:
    """What one writer was granted. Times are in seconds of the ticket's clock."""

    # Indices of our tensors that the writer fills.
    covers: frozenset[int]
    # Seconds that bytes of the writer may take to arrive.
    settle_s: float
    # When bytes of the writer have arrived, unless its process is stopped.
    until: float
    # Whether it has reported, so that it begins no write any more.
    reported: bool = False
    # Whether it has reported that no byte of it is in flight.
    settled: bool = False
    # Whether its process has ended.
    gone: bool = False
    # When bytes of it that came while this rank was stopped are in memory.
    applied_at: float = -math.inf

    def has_run_out(self, now: float) -> bool:
        """Returns whether the writer has neither reported nor renewed its lease in time."""
        return not self.reported and now >= self.until - self.settle_s

    def is_over(self, now: float) -> bool:
        """Returns whether no byte of the writer can arrive any more."""
        return now >= self.applied_at and (self.settled or (self.gone and now >= self.until))


@dataclass
class DecodeTicket:
    """The state of a ticket on one decode rank. Times are in seconds of one monotonic clock, and passed in."""

    ticket_id: str
    # Digest of the ticket, which requests must repeat.
    digest: str
    # When a writer must have asked.
    queue_deadline: float
    # Seconds that the transfer may take from then on.
    transfer_s: float
    # Seconds that a grant lasts. Each writer states how long its bytes may arrive after that.
    lease_s: float
    state: TicketState = TicketState.OPEN
    # Why the ticket failed. "" if it has not.
    reason: str = ""
    # Whether a writer reported the failure, so its engine is alive.
    failed_by_prefill: bool = False
    # Bytes that writers have reported.
    num_bytes: int = 0
    # Those of them that arrived before prefill ended.
    bytes_before_end: int = 0
    # The fewest tokens in prefill's prefix cache that a report stated.
    cached_tokens: int | None = None
    # When a writer first asked.
    _begun_at: float | None = None
    # Until when the ticket stays open although no writer is live, because prefill has ended.
    _awaits_writers_until: float = math.inf
    # The prefill engine that asked last, and owns the ticket once it has a lease.
    _engine: tuple[str, Sharding] | None = None
    _leases: dict[WriterId, _Lease] = field(default_factory=dict)
    # What is not written yet: (index of our tensor, writer's rank). Tickets of equal shape share one object at first.
    _missing: frozenset[tuple[int, int]] = frozenset()

    @property
    def is_owned(self) -> bool:
        """Whether a prefill engine was granted a write."""
        return bool(self._leases)

    @property
    def sharding(self) -> Sharding | None:
        """How the ranks of the prefill engine that asked last share KV."""
        return None if self._engine is None else self._engine[1]

    def covers(self, writer: WriterId) -> frozenset[int]:
        """Returns the indices of our tensors that a writer was granted."""
        return self._leases[writer].covers

    @property
    def deadline(self) -> float:
        """When the ticket fails unless something else happens first."""
        return self.queue_deadline if self._begun_at is None else self._begun_at + self.transfer_s

    def expect(self, engine_id: str, sharding: Sharding, expected: frozenset[tuple[int, int]]) -> None:
        """Says what an engine must write: pairs (index of our tensor, rank of the writer in its pipeline stage).

        May be called again for another engine until the ticket is owned.
        """
        assert self.state is TicketState.OPEN
        assert not self.is_owned
        self._engine = (engine_id, sharding)
        self._missing = expected

    def admit(self, request: GrantRequest, now: float) -> GrantRefused | None:
        """Decides whether anybody may still write. Returns None if so, else the answer. The time for the transfer runs
        from the first call on."""
        self.tick(now)
        if request.digest != self.digest:
            return GrantRefused("the ticket was altered", retry=False)
        if self.state is not TicketState.OPEN:
            return GrantRefused(f"the ticket is {self.state.value}: {self.reason or 'all KV is here'}", retry=False)
        self._begun_at = now if self._begun_at is None else self._begun_at
        return None

    def grant(self, request: GrantRequest, now: float) -> Granted | GrantRefused:
        """Decides a grant request, or a renewal. `expect` must have been called for the request's engine."""
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
            return GrantRefused("a renewal must cover the same tensors as the grant", retry=False)
        until = now + self.lease_s + request.settle_s
        if lease is None:
            if self._has_other(writer) or len(self._leases) == MAX_WRITERS:
                return GrantRefused(
                    "this prefill rank is or was writing for the ticket in another transfer", retry=False
                )
            claimed = {(t, w.rank) for w, other in self._leases.items() for t in other.covers}
            if not {(tensor, writer.rank) for tensor in covers} <= self._missing - claimed:
                return GrantRefused("the writer covers tensors that it must not write", retry=False)
            self._leases[writer] = _Lease(covers, request.settle_s, until)
        else:
            lease.until, lease.settle_s = until, request.settle_s
            lease.gone = False
        return Granted(self.lease_s)

    def report(self, report: WriteReport, now: float) -> bool:
        """Takes a writer's report that it has stopped. Returns False for a report that is not believed.

        With `settle_s`, the writer reports again when no byte of it is in flight. A writer without a grant may only
        report that it cannot serve the ticket.
        """
        lease = self._leases.get(report.writer)
        if lease is None:
            stranger = self._engine is not None and self._engine[0] != report.writer.engine_id
            if report.reason is None or stranger or self._has_other(report.writer):
                return False
            self._note_cached(report)
            self._fail_by(report)
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
            self._fail_by(report)
            return True
        self.num_bytes += report.num_bytes
        self.bytes_before_end += report.bytes_before_end
        self._missing -= {(tensor, report.writer.rank) for tensor in lease.covers}
        if not self._missing:
            self.state = TicketState.RECEIVED
        return True

    def gone(self, writer: WriterId, now: float) -> None:
        """A writer's connection is closed, so its process has ended. If not, its next message shows that.

        It may have been stopped until just now, so the time for its last bytes counts from now.
        """
        lease = self._leases.get(writer)
        if lease is not None and not lease.gone:
            lease.gone = True
            lease.until = max(lease.until, now + lease.settle_s)

    def resumed(self, now: float, apply_s: float) -> None:
        """This rank's process was stopped until now. Within `apply_s` seconds it applies what came meanwhile."""
        for lease in self._leases.values():
            lease.applied_at = now + apply_s

    def _fail_by(self, report: WriteReport) -> None:
        """Fails the ticket because of a writer's report, unless it has ended already."""
        self.failed_by_prefill |= self.state is TicketState.OPEN
        self.fail(f"prefill rank {report.writer.rank}: {report.reason}")

    def fail(self, reason: str) -> None:
        """Fails the ticket unless it has ended already."""
        if self.state is TicketState.OPEN:
            self.state, self.reason = TicketState.FAILED, reason

    def prefill_has_ended(self, now: float, last_asks_s: float) -> None:
        """Prefill has ended: writers have asked for a grant, or will within `last_asks_s` seconds."""
        self._awaits_writers_until = now + last_asks_s

    def tick(self, now: float) -> None:
        """Lets time pass. The ticket fails if a lease has run out, or its deadline has passed."""
        if self.state is not TicketState.OPEN:
            return
        lost = [writer for writer, lease in self._leases.items() if lease.has_run_out(now)]
        if lost:
            self.fail(f"prefill rank {lost[0].rank} of engine {lost[0].engine_id} went silent")
        elif now >= self.deadline:
            self.fail(_WAITED if self._begun_at is None else "the transfer took too long")
        elif now >= self._awaits_writers_until and not self.live_writers():
            self.fail("prefill ended without writing everything")

    def is_quiesced(self, now: float) -> bool:
        """Returns whether the ticket has ended and no writer can write any more, so that its blocks may be released."""
        return self.state is not TicketState.OPEN and all(lease.is_over(now) for lease in self._leases.values())

    def live_writers(self) -> list[WriterId]:
        """Returns the writers that have not reported, so that they may begin a write."""
        return [w for w, lease in self._leases.items() if not lease.reported]

    def overdue(self, now: float) -> list[WriterId]:
        """Returns the writers whose time has passed, but whose process may be stopped and go on later."""
        return [w for w, lease in self._leases.items() if now >= lease.until and not (lease.settled or lease.gone)]

    def _has_other(self, writer: WriterId) -> bool:
        """Returns whether the same rank has a grant for another transfer of this ticket."""
        rank = (writer.engine_id, writer.pp_rank, writer.rank)
        return any((w.engine_id, w.pp_rank, w.rank) == rank for w in self._leases if w != writer)

    def _note_cached(self, report: WriteReport) -> None:
        if report.cached_tokens is None and report.reason is not None:  # the writer may have forgotten the transfer
            return
        tokens = report.cached_tokens or 0
        self.cached_tokens = tokens if self.cached_tokens is None else min(self.cached_tokens, tokens)
