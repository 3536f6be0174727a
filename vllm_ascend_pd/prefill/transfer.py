# SPDX-License-Identifier: Apache-2.0
"""One request's transfer on a prefill rank. Three threads own parts of it, and share the rest under a lock.

The control thread owns the ticket's state. It publishes an immutable `TicketView` after each change. The model's thread
and the decode engine's sender read the latest view. They report a failure by `fail`, which stops further writes.
The control thread copies it into the ticket before it decides anything else. It reports to the model's thread
by an `Outcome` how a transfer ended.
"""

from __future__ import annotations

import functools
import math
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from vllm_ascend_pd.core import threads
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket, RankKey
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.weights import NOTHING_KNOWN, Weights
from vllm_ascend_pd.device.event import Event
from vllm_ascend_pd.prefill.checksums import StepChecksums
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout


class TransferQueue(Protocol):
    """What writes a transfer to its decode engine, in order: a `Sender`. Any thread may call it."""

    def finish(self, transfers: Sequence[Transfer]) -> None:
        """Queues the end of `transfers`, for which nothing more will be put. May be called any number of times."""

    def barrier(self) -> threading.Event:
        """Returns an event that is set when all tasks that were put before are over."""

    def engine_described(self, layout: DecodeLayout) -> None:
        """Sets where the decode engine's caches lie, which never changes. The control thread calls it before each
        transfer learns its destinations."""


@dataclass
class Withdrawals:
    """Counts how often a transfer may have lost its permission to write. All transfers of a rank share one object.

    Any thread adds to `count`, and senders read it. If a reader sees the same `count` twice, no transfer has lost its
    permission in between. Two losses at the same time may count as one.
    """

    count: int = 0


class Transfer:
    """What becomes of one ticket on one prefill rank."""

    def __init__(
        self,
        request_id: str,
        ticket: Ticket,
        sender: TransferQueue,
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
        # A secret of this rank and the decode ranks that it asks.
        self.number = secrets.randbits(63)
        # How many tokens of the prompt this engine had in its prefix cache.
        self.cached_tokens = cached_tokens
        # The weights that prefill had when the transfer began.
        self.weights = weights
        # Shared by all transfers of this rank: see `LeaseCheck`.
        self.withdrawals = withdrawals

        # The model's thread owns it.

        # The end of the prompt's last layer. The sender reads it, after it was told that the transfer ends.
        self.computed: Event | None = None
        # What was taken of its KV for `verify_kv`: one entry for each step and geometry. Empty if it is not verified.
        # The control thread reads it when no write follows.
        self.checksums: list[StepChecksums] = []
        # As in `Send`. The control thread reads it when no write follows.
        self.grows = False
        # Whether tokens were sent before that vLLM took back. The sender reads it, too.
        self.again = False
        # Whether vLLM is done with the request.
        self.released = False
        # Whether nothing reads the request's blocks any more.
        self.is_over = False

        # The sender's thread owns it, and the control thread after `ControlPlane.finish`.

        # By decode rank: how many bytes have arrived, in all and before the last layer was computed.
        self.written: dict[RankKey, tuple[int, int]] = {}
        # Until when failed writes may read and arrive, in running time. The model's thread reads it behind a barrier.
        self.in_flight_until = -math.inf
        # Whether no write follows.
        self.is_written = False

        # The control thread owns it.

        self.state = state
        # Whether the sender has said that no write follows.
        self.is_finishing = False
        # Whether decode has been notified, or cannot be reached.
        self.is_notified = False

        # Shared. `_changed` guards both, and wakes the sender. Reading one of them takes no lock.

        self._changed = threading.Condition()
        # The control thread writes it, any thread reads it.
        self._view = state.view()
        # Why the KV will not be complete. Any thread writes it, once.
        self._failure: tuple[str, PushFailure] | None = None

    @functools.cached_property
    def digest(self) -> str:
        """The ticket's digest. Computed when decode is first asked, so not on the model's thread."""
        return self.ticket.digest()

    # On any thread.

    @property
    def failure(self) -> str | None:
        """Why the KV will not be complete; None if it may be."""
        failure = self._failure
        return None if failure is None else failure[0]

    def fail(self, reason: str, cause: PushFailure) -> None:
        """Fails the transfer: no further write begins. Only the first reason counts. Does nothing after the writing."""
        with self._changed:
            if self._failure is None and self._view.is_writing:
                self._failure = reason, cause
                self.withdrawals.count += 1
                self._changed.notify_all()

    @property
    def waits_for_grant(self) -> bool:
        """Whether a decode rank has not granted or refused yet."""
        return self._failure is None and self._view.waits_for_grant

    def writable_until(self, key: RankKey) -> float:
        """As `TicketView.writable_until`."""
        return -math.inf if self._failure is not None else self._view.writable_until(key)

    def lease_until(self, key: RankKey) -> float:
        """As `TicketView.lease_until`."""
        return self._view.lease_until(key)

    # On the sender's thread. The first two methods wait until the grant deadline at most.

    def await_destinations(self) -> bool:
        """Waits until it is known where to write. Returns False if the transfer has failed."""
        return self._await(None)

    def await_grant(self, key: RankKey) -> bool:
        """Waits until a write to `key` may be planned. Returns False if it must not be."""
        return self._await(key)

    def _await(self, key: RankKey | None) -> bool:
        """Waits until `TicketView.may_write` answers. The transfer fails if a grant or a description comes too late.

        It also fails if a lease has run out while its renewal is in flight.
        """
        with self._changed:
            while self._failure is None:
                now = time.monotonic()
                if (overdue := self._view.overdue(key, now)) is not None:
                    self.fail(*overdue)
                elif (answer := self._view.may_write(key, now)) is not None:
                    return answer
                else:
                    self._changed.wait(max(0.0, self._view.grant_deadline - now))
            return False

    def wrote(self, key: RankKey, num_bytes: int, early: int) -> None:
        """Counts bytes that have arrived, `early` of them before the last layer was computed."""
        total, before = self.written.get(key, (0, 0))
        self.written[key] = (total + num_bytes, before + early)

    def mark_in_flight(self, until: float) -> None:
        """Records that a write was given up, whose bytes may arrive until `until`, in running time."""
        self.in_flight_until = max(self.in_flight_until, until)

    # On the control thread.

    @contextmanager
    def changing(self) -> Iterator[PrefillTicket]:
        """Yields the ticket's state, with failures that other threads have reported, and publishes it afterwards."""
        if threads.CHECKED:
            threads.check_owner(self.state, "Transfer.changing")
        self.take_failure()
        yield self.state
        with self._changed:
            self._view = self.state.view()
            if self.state.failure is not None and self._failure is None:
                assert self.state.cause is not None
                self._failure = self.state.failure, self.state.cause
                self.withdrawals.count += 1
            self._changed.notify_all()

    def take_failure(self) -> None:
        """Copies a failure that another thread has reported into the ticket's state."""
        if self._failure is not None and self.state.failure is None:
            self.state.fail(*self._failure)

    def num_bytes(self) -> tuple[int, int]:
        """Returns how many bytes have arrived, in all and before the last layer was computed."""
        totals = list(self.written.values())
        return sum(total for total, _ in totals), sum(early for _, early in totals)


class LeaseCheck:
    """Checks whether bytes of `transfers` may be sent to decode rank `key` now (R2), mostly by one comparison.

    The sender's thread owns it. It reads the latest views of the transfers, which share one `Withdrawals`. It keeps the
    earliest end of their leases, because a lease never gets shorter. Asking each of 32 requests for every layer instead
    adds a fifth to the sender's time (71 to 86 microseconds, benchmarks/plan.py).
    """

    def __init__(self, transfers: Sequence[Transfer], key: RankKey) -> None:
        self._transfers = transfers
        self._key = key
        self._withdrawals = transfers[0].withdrawals
        # The count of withdrawals at which all transfers could be written.
        self._withdrawn = -1
        # When the first of the leases ends.
        self._until = -math.inf

    @owned
    def may_plan(self) -> bool:
        """Whether a write for all transfers may be planned. If not, ask `Transfer.await_grant` for each of them.

        Looks at the transfers only if a lease may have ended, or a permission may have been withdrawn, since the last
        call.
        """
        withdrawn = self._withdrawals.count
        if withdrawn != self._withdrawn or time.monotonic() >= self._until:
            until = min(transfer.writable_until(self._key) for transfer in self._transfers)
            self._until = max(self._until, until)
            if time.monotonic() >= until:
                return False
            self._withdrawn = withdrawn
        return True

    @owned
    def may_begin(self) -> bool:
        """Whether bytes of all transfers may be sent now. Call it before each batch."""
        if time.monotonic() < self._until:
            return True
        self._until = min(transfer.lease_until(self._key) for transfer in self._transfers)
        return time.monotonic() < self._until


Outcome: TypeAlias = tuple[Transfer, bool]
"""A transfer that decode was notified of, and whether nothing reads the request's blocks any more. If something may,
the transfer has failed, and another outcome follows."""
