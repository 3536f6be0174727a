# SPDX-License-Identifier: Apache-2.0
"""One request's transfer as a prefill rank sees it: a ticket's state, and what the rank's threads share of it."""

import functools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket, RankKey
from vllm_ascend_pd.core.protocol import WriteReport, WriterId
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.weights import NOTHING_KNOWN, Weights
from vllm_ascend_pd.device.base import Event
from vllm_ascend_pd.prefill.grant_wait import GrantWaitLimit


@dataclass
class Withdrawals:
    """How often any of the transfers that share this may have lost its leave to write (`PrefillTicket.withdrawals`).
    Whoever sees the same `count` twice knows that none has in between. Two at once may count as one."""

    count: int = 0


@dataclass(eq=False)
class Transfer:
    """One attempt at a ticket on one prefill rank. `state` decides; it is touched in `changing` alone, by three
    threads. `number` is known to nobody but this rank and the decode ranks it asks.

    The peer's sender alone writes for the transfer, and counts `written`: bytes for each decode rank, in all and before
    the last layer was computed. `cached_tokens`: of the prompt, what this engine had in its prefix cache; `weights`:
    those that prefill had when it began. `patience`: how long others wait for its grants, `patience_ends` at the
    earliest; `planned`: some of it is to be written, or was; `finishing`: a Finish task is queued; `told`: decode knows
    how it ended, or cannot be told; `ended`: nothing reads the request's blocks any more; `released`: vLLM is done with
    the request.
    """

    request_id: str
    ticket: Ticket
    state: PrefillTicket
    withdrawals: Withdrawals = field(default_factory=Withdrawals)
    patience: GrantWaitLimit = field(default_factory=GrantWaitLimit)
    patience_ends: float = math.inf
    cached_tokens: int = 0
    weights: Weights = NOTHING_KNOWN
    planned: bool = False
    number: int = field(default_factory=lambda: secrets.randbits(63))
    written: dict[RankKey, tuple[int, int]] = field(default_factory=dict)
    computed: Event | None = None  # the end of the prompt's last layer
    finishing: bool = False
    told: bool = False
    ended: bool = False
    released: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @functools.cached_property
    def digest(self) -> str:
        """The ticket's. Made when decode is asked: the model's thread has no use for it."""
        return self.ticket.digest()

    @property
    def failure(self) -> str | None:
        return self.state.failure

    @property
    def settled_at(self) -> float:
        return self.state.settled_at

    def wrote(self, key: RankKey, num_bytes: int, early: int) -> None:
        """Counts what has arrived, `early` of it before the last layer was computed."""
        total, before = self.written.get(key, (0, 0))
        self.written[key] = (total + num_bytes, before + early)

    def report(self, writer: WriterId, key: RankKey, reason: str | None, settle_s: float) -> WriteReport:
        """Tells decode rank `key` how the transfer ended: `reason` and `settle_s` as in `WriteReport`."""
        total, early = self.written.get(key, (0, 0))
        return WriteReport(
            self.ticket.ticket_id,
            self.ticket.attempt,
            writer,
            reason,
            num_bytes=total,
            bytes_before_end=early,
            settle_s=settle_s,
            digest=self.digest,
            cached_tokens=self.cached_tokens,
        )

    @property
    def num_bytes(self) -> int:
        return sum(total for total, _ in self.written.values())

    @property
    def bytes_at_end(self) -> int:
        """Of `num_bytes`: what had arrived when the last layer was computed."""
        return sum(early for _, early in self.written.values())

    @contextmanager
    def changing(self) -> Iterator[PrefillTicket]:
        """The state, locked. Whoever waits for an answer of it asks again afterwards."""
        with self._changed:
            before = self.state.withdrawals
            yield self.state
            self._count(before)
            self._changed.notify_all()

    def _count(self, before: int) -> None:
        if self.state.withdrawals != before:
            self.withdrawals.count += 1

    def fail(self, reason: str, cause: PushFailure) -> None:
        with self.changing() as state:
            state.fail(reason, cause)

    def unsettle(self, until: float) -> None:
        with self.changing() as state:
            state.unsettle(until)

    # On the sender's thread: these wait, at most until the grant deadline.

    def await_destinations(self) -> bool:
        """Is it known where to write?"""
        return self._await(self.state.known)

    def await_grant(self, key: RankKey) -> bool:
        """May this rank write to `key` now?"""
        return self._await(lambda now: self.state.may_write(key, now))

    def finish(self) -> bool:
        """No write will follow. Is everything written?"""
        return self._await(self.state.finish)

    def _await(self, question: Callable[[float], bool | None]) -> bool:
        with self._changed:
            before = self.state.withdrawals
            waited = False
            while (answer := question(now := time.monotonic())) is None:
                waited = True
                if self.patience.is_over(self.patience_ends, now):
                    self.state.fail("no grant came, and others' KV waited behind this", PushFailure.NO_GRANT)
                else:
                    ask_at = min(self.patience.next_look(self.patience_ends, now), self.state.grant_deadline)
                    self._changed.wait(max(0.0, ask_at - now))
            if waited and answer:
                self.patience.rewarded()
            self._count(before)
            return answer
