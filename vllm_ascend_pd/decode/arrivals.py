# SPDX-License-Identifier: Apache-2.0
"""What has arrived on a decode rank, from its control thread to its model's thread."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_ascend_pd.core.step import Expect, WorkerReport
from vllm_ascend_pd.decode.checksums import Delivered
from vllm_ascend_pd.transport.wakeup import WakeupSender


@dataclass
class Arrivals:
    """What one step learns of transfers. The control thread adds to it until the model thread takes it."""

    # Requests whose tickets are closed: no prefill rank can write any more, so their blocks may be used or freed.
    closed: set[str] = field(default_factory=set)
    # Those of `closed` whose KV is not complete.
    failed: set[str] = field(default_factory=set)
    # Blocks of requests that have just failed. vLLM learns of them before it may free them.
    lost_blocks: set[int] = field(default_factory=set)
    # Tickets whose KV has arrived and must be verified before their requests join `closed`.
    delivered: list[Delivered] = field(default_factory=list)
    # All of this, as the scheduler learns it.
    report: WorkerReport = field(default_factory=WorkerReport)

    def __bool__(self) -> bool:
        return bool(self.closed or self.lost_blocks or self.delivered)

    def ticket_failed(self, expect: Expect, reason: str, by_prefill: bool) -> None:
        """A ticket failed. Prefill ranks may still write to its blocks until `ticket_closed`.

        `by_prefill`: as in WorkerReport.
        """
        self.report.failed[expect.ticket_id] = reason
        if by_prefill:
            self.report.by_prefill.add(expect.ticket_id)
        self.lost_blocks.update(expect.blocks)

    def ticket_closed(self, expect: Expect, received: tuple[int, int] | None, cached_tokens: int | None) -> None:
        """A ticket is closed: no prefill rank can write for it any more.

        `received`: bytes, and those of them that arrived before prefill ended; None if the KV is not complete.
        `cached_tokens`: how many tokens of the prompt prefill had in its prefix cache; None if no writer said so.
        """
        if received is None:
            self.failed.add(expect.request_id)
        else:
            self.report.received[expect.ticket_id] = received
        if cached_tokens is not None:
            self.report.cached[expect.ticket_id] = cached_tokens
        self.closed.add(expect.request_id)

    def ticket_verified(self, delivered: Delivered, mismatch: str | None) -> None:
        """The KV of a delivered ticket was verified. `mismatch`: what differs; None if nothing does."""
        if mismatch is not None:
            self.report.wrong.add(delivered.expect.ticket_id)
            self.ticket_failed(delivered.expect, mismatch, by_prefill=True)
        received = delivered.received if mismatch is None else None
        self.ticket_closed(delivered.expect, received, delivered.cached_tokens)


class ArrivalQueue:
    """Hands what has ended or failed from the control thread, which calls `add`, to the model thread. That calls it,
    too, when the engine goes to sleep.

    The condition guards every field. Neither thread waits for anything else while it holds the condition.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._news = Arrivals()
        # Whether the model thread waits in `take`.
        self._waiting = False
        # Where the scheduler sleeps between two steps (`transport/wakeup.py`). "": nowhere.
        self._address = ""
        # The control thread's.
        self._wakeup = WakeupSender()

    def add(self, note: Callable[[Arrivals], None], wakes: bool = True) -> None:
        """Calls `note(arrivals)` under the lock.

        `wakes`: wakes the step that waits, or else the scheduler, which sleeps before the next step.
        """
        with self._changed:
            note(self._news)
            if wakes and (self._waiting or not self._address):
                self._changed.notify_all()
            elif wakes:
                self._wakeup.wake(self._address)

    def wake_at(self, address: str) -> None:
        """Lets later news wake the scheduler at `address` while no step waits. "": it is not woken."""
        with self._changed:
            self._address = address

    def take(self, wait_s: float) -> Arrivals:
        """Returns what was added since the last call. Waits up to `wait_s` seconds if nothing was."""
        with self._changed:
            if wait_s:
                self._waiting = True
                self._changed.wait_for(lambda: bool(self._news), wait_s)
                self._waiting = False
            news, self._news = self._news, Arrivals()
        return news

    def close(self) -> None:
        """Call it when the control thread has ended."""
        self._wakeup.close()
