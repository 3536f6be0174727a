# SPDX-License-Identifier: Apache-2.0
"""A queue in which the control thread reports to the model's thread how transfers ended."""

import queue
import time
from dataclasses import dataclass

from vllm_ascend_pd.prefill.transfer import Transfer


@dataclass(frozen=True)
class Outcome:
    """How a transfer ended, after decode has been notified."""

    transfer: Transfer
    # Why its KV was not delivered; None if it was.
    failure: str | None
    # Whether nothing reads the request's blocks any more. Otherwise another outcome follows that says so.
    is_over: bool


class Outcomes:
    """A queue of outcomes. The number of transfers bounds it, but for one wake-up."""

    def __init__(self) -> None:
        # None wakes a `take` that waits.
        self._queue: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()

    def put(self, outcome: Outcome) -> None:
        self._queue.put(outcome)

    def wake(self) -> None:
        """Ends a `take` that waits, without an outcome."""
        if self.is_empty:
            self._queue.put(None)

    @property
    def is_empty(self) -> bool:
        """Whether `take` would wait. Each step checks this first: it is cheaper than a `take` that finds nothing."""
        return self._queue.empty()

    def take(self, deadline: float) -> Outcome | None:
        """Returns the next outcome. Waits for it until `deadline` of the monotonic clock.

        Returns None if there is none, or after `wake`.
        """
        try:
            return self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
