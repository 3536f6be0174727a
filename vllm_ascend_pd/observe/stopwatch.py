# SPDX-License-Identifier: Apache-2.0
"""Measures when device events happen, on a separate thread, because the model's thread must not wait for them."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from vllm_ascend_pd.device.base import DeviceError, Event

logger = logging.getLogger(__name__)

Moment = float | Event
"""Seconds of the monotonic clock, or an event that has not happened yet."""

_QUEUE = 8192


def moment(event: Event) -> Moment:
    """Returns the current time if the event has happened, else the event."""
    return time.monotonic() if event.is_done() else event


class Stopwatch:
    """Measures consecutive spans of one stream, and calls `record(begin, end)` for each in the order of `put`.

    Spans that cannot be measured, because the device failed or the queue is full, are counted in `missed`.
    """

    def __init__(self, name: str, patience_s: float) -> None:
        self.missed = 0
        self._patience_s = patience_s
        self._spans: queue.Queue[tuple[Callable[[float, float], None], Moment, Moment]] = queue.Queue(_QUEUE)
        self._closing = threading.Event()
        self._end = 0.0  # of the previous span
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, record: Callable[[float, float], None], begin: Moment, end: Moment) -> None:
        """Adds a span. It begins at `begin`, or at the end of the previous span if that is later."""
        try:
            self._spans.put_nowait((record, begin, end))
        except queue.Full:
            self.missed += 1

    def close(self, timeout_s: float) -> None:
        """Measures what is queued, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._spans.empty() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._closing.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                record, begin, end = self._spans.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                started = max(self._time(begin), self._end)
                self._end = max(self._time(end), started)
            except (TimeoutError, DeviceError):  # the sender fails the requests
                self.missed += 1
                continue
            record(started, self._end)

    def _time(self, when: Moment) -> float:
        if isinstance(when, float):
            return when
        when.wait(self._patience_s)
        return time.monotonic()
