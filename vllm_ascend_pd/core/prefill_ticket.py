# SPDX-License-Identifier: Apache-2.0
"""The state machine of a ticket on one prefill rank: whether the rank may write, and what it asks and reports.

There is one per prefill rank and ticket:

    WRITING --finish--> FINISHED --notify--> NOTIFYING --all answered, or none will--> NOTIFIED --end--> ENDED
                                                 ^-----notify: nothing can arrive any more-----'

A write begins in WRITING only, to a decode rank whose lease still runs. A lease is counted from the moment of the
request for it, so it ends here before it ends there (R2). `failure` says that the KV will not be complete (R1). It is
set once, in WRITING, and never cleared. A failed write may still read the blocks until `settled_at`. So success is
reported only after that time. A failure is reported at once, and again after that time (R2). Then the ticket ends (R3).

The control thread owns the ticket. It publishes a `TicketView` for other threads after each change.

Leases and deadlines are times of a monotonic clock. `settled_at` is a running time (`core/running_time.py`), which
stands still while the process is stopped, because the writes stand still, too. Methods call it `running`.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_ascend_pd.core.protocol import Granted, GrantRefused, Message, RankDescription
from vllm_ascend_pd.core.reasons import PushFailure

RankKey = tuple[int, int]  # (pp_rank, tp_rank)

GRANT_RETRY_S = 0.02
"""Pause before a decode rank that said "not yet" is asked again."""

_REPORT_ROUNDS = 3


class Phase(enum.Enum):
    WRITING = "writing"
    FINISHED = "finished"
    NOTIFYING = "notifying"
    NOTIFIED = "notified"
    ENDED = "ended"


@dataclass
class Destination:
    """A decode rank that the ticket is for."""

    rank: RankDescription
    # Indices of its tensors that this rank fills.
    covers: tuple[int, ...]
    # Whether it has granted the ticket.
    granted: bool = False
    # When the lease ends, on this side's clock.
    until: float = -math.inf
    lease_s: float = 0.0
    asked_at: float = -math.inf
    # Whether a request for a grant is in flight.
    asking: bool = False
    # Whether it has acknowledged the report of how the transfer ended.
    acked: bool = False

    @property
    def pause_s(self) -> float:
        """Seconds between two requests for a grant."""
        return self.lease_s / 3 if self.granted else GRANT_RETRY_S


@dataclass(frozen=True)
class TicketView:
    """What a ticket that has not failed allows at one moment. It is immutable, so any thread may read it.

    An old view never allows too much: leases only get longer. A write that begins after a failure does no harm while
    its lease runs.
    """

    # Whether writes may still follow.
    is_writing: bool
    # Whether it is known where to write.
    is_located: bool
    # When a description or a grant comes too late.
    grant_deadline: float
    # When the lease of each decode rank ends that has granted.
    leases: Mapping[RankKey, float] = field(default_factory=dict)
    # Whether a decode rank has not granted or refused yet.
    waits_for_grant: bool = True

    def may_write(self, key: RankKey | None, now: float) -> bool | None:
        """Whether a write to decode rank `key` may be planned; None if that is not known yet.

        If `key` is None: whether it is known where to write.
        """
        if not self.is_writing:
            return False
        if key is None:
            return self.is_located or None
        until = self.leases.get(key)
        return None if until is None else now < until

    def overdue(self, key: RankKey | None, now: float) -> tuple[str, PushFailure] | None:
        """Returns why a write to `key` must fail now because something came too late; None if it need not fail.

        `key` is None if the decode ranks are not known yet.
        """
        if not self.is_located:
            late = "the decode engine did not describe itself in time", PushFailure.UNREACHABLE
            return late if now >= self.grant_deadline else None
        if key is None:
            return None
        until = self.leases.get(key)
        if until is None:
            late = f"decode rank {key} gave no grant in time", PushFailure.NO_GRANT
            return late if now >= self.grant_deadline else None
        return (f"the lease for decode rank {key} ran out", PushFailure.LEASE) if now >= until else None

    def writable_until(self, key: RankKey) -> float:
        """Returns the time until which `may_write` returns True in this view; -inf if it does not."""
        return self.lease_until(key) if self.is_writing else -math.inf

    def lease_until(self, key: RankKey) -> float:
        """Returns the time until which bytes for `key` may be sent. They do no harm while the lease runs, so a failure
        does not change it."""
        return self.leases.get(key, -math.inf)


@dataclass
class PrefillTicket:
    """The state of a ticket on one prefill rank. Times are in seconds, and passed in."""

    # Until when a description and grants may come.
    grant_deadline: float
    phase: Phase = Phase.WRITING
    failure: str | None = None
    # The kind of failure.
    cause: PushFailure | None = None
    # Until when failed writes may read and arrive, in running time.
    settled_at: float = -math.inf
    # Where to write, and whom to notify. None until that is known.
    destinations: dict[RankKey, Destination] | None = None
    # How often decode was notified.
    rounds: int = 0
    # Whether the last report said that nothing can arrive any more.
    final: bool = False

    def fail(self, reason: str, cause: PushFailure) -> None:
        """Records the first reason. Has no effect once the writing is over."""
        if self.failure is None and self.phase is Phase.WRITING:
            self.failure, self.cause = reason, cause

    @property
    def waits_for_grant(self) -> bool:
        """Whether a decode rank has not granted or refused yet."""
        if self.failure is not None or self.phase is not Phase.WRITING:
            return False
        destinations = self.destinations
        return destinations is None or not all(d.granted for d in destinations.values())

    def view(self) -> TicketView:
        destinations = self.destinations or {}
        return TicketView(
            self.phase is Phase.WRITING,
            self.destinations is not None,
            self.grant_deadline,
            {key: d.until for key, d in destinations.items() if d.granted},
            self.waits_for_grant,
        )

    def contacted(self, destinations: dict[RankKey, Destination]) -> None:
        """Takes the decode ranks to write to. There are none if the decode engine did not describe itself."""
        self.destinations = destinations

    # Grants.

    def due(self, now: float) -> list[RankKey]:
        """Returns the decode ranks to ask for a grant, or for its renewal."""
        if self.failure is not None or self.phase not in (Phase.WRITING, Phase.FINISHED):
            return []
        destinations = (self.destinations or {}).items()
        return [key for key, d in destinations if not d.asking and now - d.asked_at >= d.pause_s]

    def asked(self, key: RankKey, now: float) -> Destination:
        destination = self._destination(key)
        destination.asking = True
        destination.asked_at = now
        return destination

    def answered(self, key: RankKey, asked_at: float, answer: Message | Exception) -> bool:
        """Takes the answer to the request sent at `asked_at`. Returns whether the rank has refused for good."""
        destination = self._destination(key)
        destination.asking = False
        if isinstance(answer, Granted):
            destination.granted = True
            destination.lease_s = answer.lease_s
            destination.until = max(destination.until, asked_at + answer.lease_s)
        elif isinstance(answer, GrantRefused) and not answer.retry:
            self.fail(f"decode rank {key} refused: {answer.reason}", PushFailure.REFUSED)
            return True
        return False

    # Writing.

    def mark_in_flight(self, until: float) -> None:
        """Records that a write was given up, whose bytes may arrive until `until`."""
        self.settled_at = max(self.settled_at, until)

    def finish(self, now: float) -> bool | None:
        """Ends the writing. Returns whether the KV is complete.

        Returns None while decode may still describe itself or grant: call it again when something has changed.
        """
        view = self.view()
        for key in self.destinations or (None,):
            if (overdue := view.overdue(key, now)) is not None:
                self.fail(*overdue)
        if self.waits_for_grant:
            return None
        self.phase = Phase.FINISHED
        return self.failure is None

    # The end.

    def notify(self, running: float) -> bool:
        """Returns whether decode must be notified now. `notify_pending` says which ranks.

        A failure is reported at once. Success is reported only when no byte can arrive any more, because decode then
        uses the blocks. Ranks that acknowledged a failure are notified again when no byte can arrive any more. Ranks
        that did not will ask.
        """
        settled = running >= self.settled_at
        if self.phase is Phase.FINISHED and self.destinations is not None:
            if self.failure is None and not settled:
                return False
        elif self.phase is Phase.NOTIFIED and settled and not self.final:
            self.rounds = 0
            for destination in (self.destinations or {}).values():
                destination.acked = not destination.acked
        else:
            return False
        self.phase = Phase.NOTIFYING
        self.final = settled
        return True

    def settle_s(self, running: float) -> float:
        """Returns for how many seconds bytes may still arrive."""
        return max(0.0, self.settled_at - running)

    def notify_pending(self) -> dict[RankKey, Destination]:
        """Begins a round of reports. Returns the decode ranks to report to: those that have not acknowledged a report.

        The result is empty when all have acknowledged, or after the last round: then decode counts as notified.
        """
        pending = {key: d for key, d in (self.destinations or {}).items() if not d.acked}
        if not pending or self.rounds == _REPORT_ROUNDS:
            self.phase = Phase.NOTIFIED
            return {}
        self.rounds += 1
        return pending

    def acked(self, key: RankKey) -> None:
        """Records that decode rank `key` has acknowledged the report."""
        self._destination(key).acked = True

    def end(self) -> bool:
        """Ends the ticket if decode was notified or cannot be reached, and nothing reads the blocks any more. Returns
        whether it has ended."""
        if self.phase is not Phase.NOTIFIED or not self.final:
            return False
        self.phase = Phase.ENDED
        return True

    def _destination(self, key: RankKey) -> Destination:
        assert self.destinations is not None
        return self.destinations[key]
