# SPDX-License-Identifier: Apache-2.0
"""Hands ended transfers from a decode rank's control thread to its model thread.

Both threads use one `ArrivalQueue`. Its condition guards every field, and neither thread waits for anything else while
it holds the condition.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.transport.wakeup import WakeupSender


@dataclass(frozen=True)
class Arrivals:
    """What one step learns of transfers."""

    # Requests that no prefill rank can write for any more: their blocks may be used or freed.
    finished: set[str]
    # Those of `finished` whose KV is not complete.
    failed: set[str]
    # Blocks of requests that have just failed. vLLM learns of them before it may free them.
    lost_blocks: set[int]


@dataclass
class _News:
    """What the model thread has not taken yet."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    lost_blocks: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.finished or self.lost_blocks)


class ArrivalQueue:
    """Transfers that ended or failed on the control thread, until a step takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # All of these change under the condition.
        self._news = _News()
        self._report = WorkerReport()
        # Whether the model thread waits in `take`.
        self._waiting = False
        # Where the scheduler sleeps between two steps (`transport/wakeup.py`). "": nowhere.
        self._address = ""
        # The control thread's.
        self._wakeup = WakeupSender()

    # The control thread calls these.

    def ticket_failed(self, ticket_id: str, reason: str, blocks: Collection[int]) -> None:
        """A ticket failed. Prefill ranks may still write to `blocks` until `ticket_ended`."""
        with self._changed:
            self._report.failed[ticket_id] = reason
            self._news.lost_blocks.update(blocks)
            self._wake()

    def ticket_ended(
        self, ticket_id: str, request_id: str, received: tuple[int, int] | None, cached_tokens: int | None
    ) -> None:
        """No prefill rank can write for a ticket any more.

        `received`: bytes, and those of them that arrived before prefill ended; None if the KV is not complete.
        `cached_tokens`: how many tokens of the prompt prefill had in its prefix cache; None if no writer said so.
        """
        with self._changed:
            if received is None:
                self._news.failed.add(request_id)
            else:
                self._report.received[ticket_id] = received
            if cached_tokens is not None:
                self._report.cached[ticket_id] = cached_tokens
            self._news.finished.add(request_id)
            self._wake()

    # The model thread calls these.

    def wake_at(self, address: str) -> None:
        """Lets later news wake the scheduler at `address` while no step waits. "": it is not woken."""
        with self._changed:
            self._address = address

    def take(self, wait_s: float) -> Arrivals:
        """Returns what has ended since the last call. Waits up to `wait_s` seconds if nothing has."""
        with self._changed:
            if wait_s:
                self._waiting = True
                self._changed.wait_for(lambda: bool(self._news), wait_s)
                self._waiting = False
            news, self._news = self._news, _News()
        return Arrivals(news.finished, news.failed, news.lost_blocks)

    def take_report(self) -> WorkerReport:
        """Returns what has happened since the last call, for the scheduler."""
        with self._changed:
            report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        """Call it when the control thread has ended."""
        self._wakeup.close()

    def _wake(self) -> None:
        """Wakes the step that waits, or else the scheduler, which sleeps before the next step."""
        if self._waiting or not self._address:
            self._changed.notify_all()
        else:
            self._wakeup.wake(self._address)
