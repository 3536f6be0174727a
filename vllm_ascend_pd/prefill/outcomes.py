# SPDX-License-Identifier: Apache-2.0
"""What the control thread tells the model's thread: how transfers ended. The control thread puts, the model's takes."""

import queue
import time
from dataclasses import dataclass

from vllm_ascend_pd.prefill.transfer import Transfer


@dataclass(frozen=True)
class Outcome:
    """Of a transfer that decode has been notified of."""

    transfer: Transfer
    # Why its KV was not delivered; None if it was.
    failure: str | None
    # Nothing reads the request's blocks any more. If not, another outcome follows that says so.
    is_over: bool


class Outcomes:
    """A queue of outcomes. The number of transfers bounds it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def put(self, outcome: Outcome) -> None:
        self._queue.put(outcome)

    @property
    def is_empty(self) -> bool:
        """Whether `take` would wait. Every step asks, and a call of `take` that finds nothing costs more."""
        return self._queue.empty()

    def take(self, deadline: float) -> Outcome | None:
        """Returns the next outcome. Waits for it until `deadline` of the monotonic clock; None if there is none."""
        try:
            return self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
