# SPDX-License-Identifier: Apache-2.0
"""The state machine of a ticket on one prefill rank: whether the rank may write, and what it asks and reports.

There is one per prefill rank and ticket:

    WRITING --finish--> FINISHED --notify--> NOTIFYING --all answered, or none will--> NOTIFIED --end--> ENDED
                                                 ^-----notify: nothing can arrive any more-----'

A write begins in WRITING only, to a decode rank whose lease still runs. A lease is counted from the moment of the
request for it, so it ends here before it ends there (R2). `failure` says that the KV will not be complete (R1). It is
set once, before decode is notified, and never cleared. A failed write may still read the blocks until `settled_at`. So
success is reported only after that time: until then the blocks may get other content, which fails the ticket (R3). A
failure is reported at once, and again after that time (R2). Then the ticket ends (R3).

The control thread takes all steps. Any thread may fail the ticket. The sender's thread asks whether it may write, waits
for that, and counts what has arrived. One lock guards each change that another thread may see. A failure, destinations
and grants wake the sender.
Reading takes no lock: a failure stays, and leases only get longer. A write that begins after a failure does no harm
while its lease runs.

Leases and deadlines are times of a monotonic clock. `settled_at` is a running time (`core/running_time.py`), which
stands still while the process is stopped, because the writes stand still, too. Methods call it `running`.
"""

import enum
import math
import threading
import time
from dataclasses import dataclass, field

from vllm_ascend_pd.core.protocol import Granted, GrantRefused, Message, RankDescription
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.threads import owned

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
    # Bytes that have arrived there, and how many of them before the prompt's last layer was computed. The sender's
    # thread adds to them. The control thread reads them when no write follows.
    num_bytes: int = 0
    early_bytes: int = 0


@dataclass
class PrefillTicket:
    """The state of a ticket on one prefill rank. Times are in seconds. Methods get them, but for `await_write`."""

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

    # Guards the phase until it is NOTIFYING, the failure, `settled_at`, the destinations and their leases.
    _changed: threading.Condition = field(default_factory=lambda: threading.Condition(), repr=False, compare=False)

    # On any thread.

    def fail(self, reason: str, cause: PushFailure) -> None:
        """Records the first reason: no further write may be planned. Has no effect once decode is being notified."""
        with self._changed:
            if self.failure is None and self.phase in (Phase.WRITING, Phase.FINISHED):
                self.failure, self.cause = reason, cause
                self._changed.notify_all()

    @property
    def waits_for_grant(self) -> bool:
        """Whether a decode rank has not granted or refused yet."""
        if self.failure is not None or self.phase is not Phase.WRITING:
            return False
        destinations = self.destinations
        return destinations is None or not all(d.granted for d in destinations.values())

    # On the sender's thread, and `may_write` also on the control thread, by `finish`.

    def may_write(self, key: RankKey | None, now: float) -> bool | None:
        """Returns whether a write to decode rank `key` may be planned; None if that is not known yet.

        If `key` is None: whether it is known where to write. The ticket fails if the answer comes too late: after the
        grant deadline, or when the lease has ended, even if a renewal is in flight.
        """
        if self.failure is not None or self.phase is not Phase.WRITING:
            return False
        if self.destinations is None:
            late = "the decode engine did not describe itself in time", PushFailure.UNREACHABLE
        elif key is None:
            return True
        elif (destination := self.destinations.get(key)) is None or not destination.granted:
            late = f"decode rank {key} gave no grant in time", PushFailure.NO_GRANT
        elif now < destination.until:
            return True
        else:
            self.fail(f"the lease for decode rank {key} ran out", PushFailure.LEASE)
            return False
        if now < self.grant_deadline:
            return None
        self.fail(*late)
        return False

    def await_write(self, key: RankKey | None) -> bool:
        """Waits until `may_write` has an answer, and returns it: until the grant deadline at most."""
        with self._changed:
            while (answer := self.may_write(key, now := time.monotonic())) is None:
                self._changed.wait(max(0.0, self.grant_deadline - now))
            return answer

    def lease_until(self, key: RankKey) -> float:
        """Returns the time until which bytes for `key` may be sent. They do no harm while the lease runs, so a failure
        does not change it."""
        destination = (self.destinations or {}).get(key)
        return -math.inf if destination is None else destination.until

    def delay_settling(self, until: float) -> None:
        """Records that a write was given up, whose bytes may arrive until `until`, in running time."""
        with self._changed:
            self.settled_at = max(self.settled_at, until)

    # On the control thread: all that follows.

    @owned
    def contacted(self, destinations: dict[RankKey, Destination]) -> None:
        """Takes the decode ranks to write to. There are none if the decode engine did not describe itself."""
        with self._changed:
            self.destinations = destinations
            self._changed.notify_all()

    # Grants.

    @owned
    def due(self, now: float) -> list[RankKey]:
        """Returns the decode ranks to ask for a grant, or for its renewal."""
        if self.failure is not None or self.phase not in (Phase.WRITING, Phase.FINISHED):
            return []
        return [
            key
            for key, each in (self.destinations or {}).items()
            if not each.asking and now - each.asked_at >= (each.lease_s / 3 if each.granted else GRANT_RETRY_S)
        ]

    @owned
    def asked(self, key: RankKey, now: float) -> Destination:
        destination = self._destination(key)
        destination.asking = True
        destination.asked_at = now
        return destination

    @owned
    def answered(self, key: RankKey, asked_at: float, answer: Message | Exception) -> bool:
        """Takes the answer to the request sent at `asked_at`. Returns whether the rank has refused for good."""
        destination = self._destination(key)
        destination.asking = False
        if isinstance(answer, Granted):
            with self._changed:
                destination.lease_s = answer.lease_s
                destination.until = max(destination.until, asked_at + answer.lease_s)
                destination.granted = True
                self._changed.notify_all()
        elif isinstance(answer, GrantRefused) and not answer.retry:
            self.fail(f"decode rank {key} refused: {answer.reason}", PushFailure.REFUSED)
            return True
        return False

    # The end.

    @owned
    def finish(self, now: float) -> bool | None:
        """Ends the writing. Returns whether the KV is complete.

        Returns None while decode may still describe itself or grant: call it again when something has changed.
        """
        for key in self.destinations or (None,):
            self.may_write(key, now)  # fails the ticket if it is too late
        with self._changed:
            if self.waits_for_grant:
                return None
            self.phase = Phase.FINISHED
            return self.failure is None

    @owned
    def delivered_bytes(self) -> tuple[int, int]:
        """Returns how many bytes have arrived, in all and before the last layer was computed."""
        ranks = (self.destinations or {}).values()
        return sum(rank.num_bytes for rank in ranks), sum(rank.early_bytes for rank in ranks)

    @owned
    def begin_notifying(self, running: float) -> bool:
        """Returns whether decode must be notified now. `next_round` says which ranks.

        A failure is reported at once. Success is reported only when no byte can arrive any more, because decode then
        uses the blocks. Ranks that acknowledged a failure are notified again when no byte can arrive any more. Ranks
        that did not will ask.
        """
        with self._changed:
            settled = running >= self.settled_at
            if self.phase is Phase.FINISHED and self.destinations is not None:
                if self.failure is None and not settled:
                    return False
            elif self.phase is Phase.NOTIFIED and settled and not self.final:
                self.rounds = 0
                for destination in (self.destinations or {}).values():
                    destination.acked = not destination.acked  # those that have not acknowledged the failure will ask
            else:
                return False
            self.phase = Phase.NOTIFYING
            self.final = settled
            return True

    def settle_s(self, running: float) -> float:
        """Returns for how many seconds bytes may still arrive."""
        return max(0.0, self.settled_at - running)

    @owned
    def next_round(self) -> dict[RankKey, Destination]:
        """Begins a round of reports. Returns the decode ranks to report to: those that have not acknowledged a report.

        The result is empty when all have acknowledged, or after the last round: then decode counts as notified.
        """
        pending = {key: d for key, d in (self.destinations or {}).items() if not d.acked}
        if not pending or self.rounds == _REPORT_ROUNDS:
            self.phase = Phase.NOTIFIED
            return {}
        self.rounds += 1
        return pending

    @owned
    def acked(self, key: RankKey) -> None:
        """Records that decode rank `key` has acknowledged the report."""
        self._destination(key).acked = True

    @owned
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
