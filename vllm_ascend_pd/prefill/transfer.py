# SPDX-License-Identifier: Apache-2.0
"""One request's transfer on a prefill rank: what each of three threads owns of it, and what they share.

The control thread owns the ticket's state. It publishes an immutable `TicketView` after each change. The model's thread
and the peer's sender read the latest view. They report a failure by `fail`, which stops further writes at once, and
which the control thread takes over into the ticket before it decides anything else.
"""

from __future__ import annotations

import functools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.core import threads
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket, RankKey, TicketView
from vllm_ascend_pd.core.protocol import WriteReport, WriterId
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.weights import NOTHING_KNOWN, Weights
from vllm_ascend_pd.device.base import Event

if TYPE_CHECKING:
    from vllm_ascend_pd.prefill.sender import Sender


@dataclass
class Withdrawals:
    """How often a transfer that shares this may have lost its permission to write. Any thread adds to `count`, senders
    read it. Whoever sees the same `count` twice knows that none has in between. Two at once may count as one."""

    count: int = 0


class Transfer:
    """One attempt at a ticket on one prefill rank."""

    def __init__(
        self,
        request_id: str,
        ticket: Ticket,
        sender: Sender,
        state: PrefillTicket,
        withdrawals: Withdrawals,
        cached_tokens: int = 0,
        weights: Weights = NOTHING_KNOWN,
    ) -> None:
        # Fixed. Any thread reads it.

        self.request_id = request_id
        self.ticket = ticket
        # Writes to the decode engine that issued the ticket.
        self.sender = sender
        # Known to nobody but this rank and the decode ranks it asks.
        self.number = secrets.randbits(63)
        # How many tokens of the prompt this engine had in its prefix cache.
        self.cached_tokens = cached_tokens
        # Those that prefill had when the transfer began.
        self.weights = weights
        # Shared by all transfers of this rank: see `LeaseCheck`.
        self.withdrawals = withdrawals
        # From when on others of the same sender need not wait for this one's grants.
        self._grant_wait_ends = state.grant_deadline

        # The model's thread owns it.

        # Some of it is to be written, or was. The sender reads it.
        self.planned = False
        # The end of the prompt's last layer. Set before the sender is told that the transfer ends, which reads it.
        self.computed: Event | None = None
        # vLLM is done with the request.
        self.released = False
        # Nothing reads the request's blocks any more.
        self.is_over = False

        # The sender's thread owns it, and the control thread after `TransferControl.finish`.

        # By decode rank: how many bytes have arrived, in all and before the last layer was computed.
        self.written: dict[RankKey, tuple[int, int]] = {}
        # Until when failed writes may read and arrive, in running time. The model's thread reads it behind a barrier.
        self.in_flight_until = -math.inf
        # No write follows.
        self.is_written = False

        # The control thread owns it.

        self.state = state
        # The sender has said that no write follows.
        self.is_finishing = False
        # Decode has been notified, or cannot be.
        self.is_notified = False

        # Shared. `_changed` guards both, and wakes the sender. Reading one of them takes no lock.

        self._changed = threading.Condition()
        # The control thread writes it, any thread reads it.
        self._view = state.view()
        # Why the KV will not be complete. Any thread writes it, once.
        self._failure: tuple[str, PushFailure] | None = None

    @functools.cached_property
    def digest(self) -> str:
        """The ticket's. Made when decode is asked: the model's thread has no use for it."""
        return self.ticket.digest()

    # On any thread.

    @property
    def failure(self) -> str | None:
        """Why the KV will not be complete."""
        failure = self._failure
        return None if failure is None else failure[0]

    def fail(self, reason: str, cause: PushFailure) -> None:
        """No further write begins. The first reason counts. Without effect once all is written."""
        with self._changed:
            self._fail(reason, cause)

    def _fail(self, reason: str, cause: PushFailure) -> None:
        if self._failure is None and self._view.is_writing:
            self._failure = reason, cause
            self.withdrawals.count += 1
            self._changed.notify_all()

    @property
    def waits_for_grant(self) -> bool:
        """Whether a decode rank has still to answer yes or no."""
        return self._failure is None and self._view.waits_for_grant

    @property
    def may_be_written(self) -> bool:
        """Whether all decode ranks have granted, and not everything is written."""
        return self._failure is None and self._view.may_be_written

    def writable_until(self, key: RankKey) -> float:
        """As `TicketView.writable_until`."""
        return -math.inf if self._failure is not None else self._view.writable_until(key)

    def lease_until(self, key: RankKey) -> float:
        """As `TicketView.lease_until`."""
        return self._view.lease_until(key)

    # On the sender's thread. The first two wait, at most until the grant deadline.

    def await_destinations(self) -> bool:
        """Returns whether it is known where to write."""
        return self._await(None, lambda view, now: view.located())

    def await_grant(self, key: RankKey) -> bool:
        """Returns whether a write to `key` may be planned now."""
        return self._await(key, lambda view, now: view.may_write(key, now))

    def _await(self, key: RankKey | None, question: Callable[[TicketView, float], bool | None]) -> bool:
        """What came too late fails the transfer. A renewal may be under way: then the two cross, and it fails too."""
        limit, waited = self.sender.grant_wait, False
        with self._changed:
            while self._failure is None:
                now = time.monotonic()
                if (overdue := self._view.overdue(key, now)) is not None:
                    self._fail(*overdue)
                elif (answer := question(self._view, now)) is not None:
                    if waited and answer:
                        limit.rewarded()
                    return answer
                elif limit.is_over(self._grant_wait_ends, now):
                    self._fail("no grant came, and others' KV waited behind this", PushFailure.NO_GRANT)
                else:
                    waited = True
                    ask_at = min(limit.next_look(self._grant_wait_ends, now), self._view.grant_deadline)
                    self._changed.wait(max(0.0, ask_at - now))
            return False

    def wrote(self, key: RankKey, num_bytes: int, early: int) -> None:
        """Counts what has arrived, `early` of it before the last layer was computed."""
        total, before = self.written.get(key, (0, 0))
        self.written[key] = (total + num_bytes, before + early)

    def mark_in_flight(self, until: float) -> None:
        """A write was given up: its bytes may arrive until then, in running time."""
        self.in_flight_until = max(self.in_flight_until, until)

    # On the control thread.

    @contextmanager
    def changing(self) -> Iterator[PrefillTicket]:
        """Yields the state, and publishes it afterwards. A failure that another thread has reported is in it."""
        if threads.CHECKED:
            threads.check_owner(self.state, "Transfer.changing")
        self.take_failure()
        before = self.state.withdrawals
        yield self.state
        with self._changed:
            self._view = self.state.view()
            if self.state.failure is not None and self._failure is None:
                assert self.state.cause is not None
                self._failure = self.state.failure, self.state.cause
            if self.state.withdrawals != before:
                self.withdrawals.count += 1
            self._changed.notify_all()

    def take_failure(self) -> None:
        """Takes over into the state what another thread has reported."""
        if self._failure is not None and self.state.failure is None:
            self.state.fail(*self._failure)

    def report(self, writer: WriterId, key: RankKey, reason: str | None, settle_s: float) -> WriteReport:
        """Returns what decode rank `key` is told: `reason` and `settle_s` as in `WriteReport`."""
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
