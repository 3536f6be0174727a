# SPDX-License-Identifier: Apache-2.0
"""A ticket as a prefill rank sees it: may it write, whom does it ask, what does it say in the end?

The prefill side's state machine, one per prefill rank and ticket:

    WRITING --finish--> FINISHED --tell--> TELLING --all answered, or none will--> TOLD --end--> ENDED
                                              ^-----------tell: nothing can arrive any more-----------'

A write begins in WRITING only, to a decode rank whose lease still runs (`may_write`); a lease is counted from when
it was asked for, so it ends here before it ends there (R2). `failure` says that the KV will not be complete (R1): it
is set once, in WRITING, and never cleared, and no write begins after it. Whatever may still read the blocks once the
writes are over, does so until `settled_at`: success is told only after that, a failure at once and once more after it
(R2), and only then the ticket ends (R3).

Leases and deadlines are dates of a monotonic clock. `settled_at` is a date of one that stands still while the process
is stopped, as do the writes that are to settle; methods that depend on it call it `running`.
"""

import enum
import math
from dataclasses import dataclass

from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.protocol import Complete, Granted, GrantRefused, Message, RankDescription

RankKey = tuple[int, int]  # (pp_rank, tp_rank)

GRANT_RETRY_S = 0.02
"""Until who said not yet is asked again."""

_REPORT_ROUNDS = 3


class Phase(enum.Enum):
    WRITING = "writing"
    FINISHED = "finished"
    TELLING = "telling"
    TOLD = "told"
    ENDED = "ended"


@dataclass
class Destination:
    """A decode rank. `covers`: indices of its tensors that this rank fills; `until`: when the lease ends on this
    side's clock; `complete`: it needs nothing; `told`: it knows how the transfer ended."""

    rank: RankDescription
    covers: tuple[int, ...]
    granted: bool = False
    until: float = -math.inf
    lease_s: float = 0.0
    asked_at: float = -math.inf
    asking: bool = False
    complete: bool = False
    told: bool = False

    @property
    def pause_s(self) -> float:
        """Between two requests."""
        return self.lease_s / 3 if self.granted else GRANT_RETRY_S


@dataclass
class PrefillTicket:
    """Times are seconds, passed in.

    `known`, `may_write` and `finish` answer yes, no, or None: not yet, ask again when something has changed; never
    None from `grant_deadline` on, which moves while decode asks for patience, to `patience_ends` at most.
    `destinations`: where to write, once that is known, and whom to tell; `final`: what was told last is that nothing
    can arrive any more.
    """

    grant_deadline: float
    patience_ends: float = math.inf
    phase: Phase = Phase.WRITING
    failure: str | None = None
    cause: PushFailure | None = None  # of the failure
    settled_at: float = -math.inf
    destinations: dict[RankKey, Destination] | None = None
    rounds: int = 0  # of telling
    final: bool = False
    withdrawals: int = 0  # how often `leave` may have become less than it was

    def fail(self, reason: str, cause: PushFailure) -> None:
        """Records the first reason. Has no effect once the writing is over."""
        if self.failure is None and self.phase is Phase.WRITING:
            self.failure, self.cause = reason, cause
            self.withdrawals += 1

    @property
    def waits_for_grant(self) -> bool:
        """Whether a decode rank has still to say yes or no. Any thread may ask: it may be over when it is told."""
        if self.failure is not None or self.phase is not Phase.WRITING:
            return False
        destinations = self.destinations
        return destinations is None or not all(d.granted or d.complete for d in destinations.values())

    @property
    def may_be_written(self) -> bool:
        """Whether all decode ranks have said yes, and not everything is written. Any thread may ask."""
        return self.failure is None and self.phase is Phase.WRITING and not self.waits_for_grant

    def contacted(self, destinations: dict[RankKey, Destination]) -> None:
        """The decode engine is known, or will not be."""
        self.destinations = destinations

    # Grants.

    def due(self, now: float) -> list[RankKey]:
        """Whom to ask for a grant, or to renew it."""
        if self.failure is not None or self.phase not in (Phase.WRITING, Phase.FINISHED):
            return []
        destinations = (self.destinations or {}).items()
        return [key for key, d in destinations if not (d.asking or d.complete) and now - d.asked_at >= d.pause_s]

    def asked(self, key: RankKey, now: float) -> Destination:
        destination = self._destination(key)
        destination.asking = True
        destination.asked_at = now
        return destination

    def answered(self, key: RankKey, asked_at: float, answer: Message | Exception) -> bool:
        """To the request of `asked_at`. Whether that was a last no; what is neither yes nor no may pass."""
        destination = self._destination(key)
        destination.asking = False
        if isinstance(answer, Granted):
            destination.granted = True
            destination.lease_s = answer.lease_s
            destination.until = max(destination.until, asked_at + answer.lease_s)
        elif isinstance(answer, Complete):
            destination.complete = True
            self.withdrawals += 1
        elif isinstance(answer, GrantRefused) and answer.retry:
            self.grant_deadline = max(self.grant_deadline, min(asked_at + answer.wait_s, self.patience_ends))
        elif isinstance(answer, GrantRefused):
            self.fail(f"decode rank {key} refused: {answer.reason}", PushFailure.REFUSED)
            return True
        return False

    # Writing.

    def known(self, now: float) -> bool | None:
        """Is it known where to write?"""
        if self.failure is None and self.destinations is None:
            if now < self.grant_deadline:
                return None
            self.fail("the decode engine did not describe itself in time", PushFailure.UNREACHABLE)
        return self.failure is None

    def may_write(self, key: RankKey, now: float) -> bool | None:
        """May a write to `key` be planned now? It may begin as long as `holds`. To a rank that needs nothing none."""
        if self.failure is not None:  # which may be that nobody is known to write to
            return False
        if self._destination(key).complete:
            return False
        if not self._destination(key).granted:
            if now < self.grant_deadline:
                return None
            self.fail(f"decode rank {key} gave no grant in time", PushFailure.NO_GRANT)
        if self.failure is None and not self.holds(key, now):
            self.fail(f"the lease for decode rank {key} ran out", PushFailure.LEASE)
        return self.failure is None and self.phase is Phase.WRITING

    def leave(self, key: RankKey) -> float:
        """Until when `may_write` says yes unless something changes; -inf: it may say something else. Any thread may ask
        without more: as if it had asked a moment earlier."""
        destination = (self.destinations or {}).get(key)
        if self.failure is not None or self.phase is not Phase.WRITING or destination is None or destination.complete:
            return -math.inf
        return destination.until

    def lease(self, key: RankKey) -> float:
        """Until when bytes for `key` may leave; it only gets later, so any thread may ask. Even after a failure they
        do no harm as long as the lease runs."""
        return self._destination(key).until

    def holds(self, key: RankKey, now: float) -> bool:
        """May bytes for `key` leave now?"""
        return now < self.lease(key)

    def unsettle(self, until: float) -> None:
        """A write was given up: what is on its way arrives by `until`."""
        self.settled_at = max(self.settled_at, until)

    def finish(self, now: float) -> bool | None:
        """No write will begin any more. Whether the KV is complete: only who holds all its grants may say so."""
        if self.known(now):
            answers = [self.may_write(key, now) for key in self.destinations or ()]
            if self.failure is None and None in answers:
                return None
        elif self.failure is None:
            return None
        self.phase = Phase.FINISHED
        return self.failure is None

    # The end.

    def tell(self, running: float) -> bool:
        """Is decode to be told now? A failure at once, success only when no byte can arrive any more: decode goes
        on with the blocks. Who has heard of a failure hears once more when no byte can arrive any more; who has not,
        asks."""
        settled = running >= self.settled_at
        if self.phase is Phase.FINISHED and self.destinations is not None:
            if self.failure is None and not settled:
                return False
        elif self.phase is Phase.TOLD and settled and not self.final:
            self.rounds = 0
            for destination in (self.destinations or {}).values():
                destination.told = not destination.told
        else:
            return False
        self.phase = Phase.TELLING
        self.final = settled
        return True

    def settle_s(self, running: float) -> float:
        """How long bytes may still arrive."""
        return max(0.0, self.settled_at - running)

    def next_round(self) -> dict[RankKey, Destination]:
        """Whom to tell: all, then those that have not answered. Nobody: the telling is over."""
        untold = {key: d for key, d in (self.destinations or {}).items() if not d.told}
        if not untold or self.rounds == _REPORT_ROUNDS:
            self.phase = Phase.TOLD
            return {}
        self.rounds += 1
        return untold

    def told(self, key: RankKey) -> None:
        self._destination(key).told = True

    def end(self) -> bool:
        """Is it over now? Decode knows or cannot be reached, and nothing reads the blocks any more."""
        if self.phase is not Phase.TOLD or not self.final:
            return False
        self.phase = Phase.ENDED
        return True

    def _destination(self, key: RankKey) -> Destination:
        assert self.destinations is not None
        return self.destinations[key]
