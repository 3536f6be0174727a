# SPDX-License-Identifier: Apache-2.0
"""Notes when device events happen, on a thread of its own: the model's thread may not wait for them."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from vllm_ascend_pd.device.base import DeviceError, Event

logger = logging.getLogger(__name__)

Moment = float | Event
"""A time of the monotonic clock in seconds, or what has yet to happen."""

_QUEUE = 8192


def moment(event: Event) -> Moment:
    """The time, if it has happened already."""
    return time.monotonic() if event.is_done() else event


class Stopwatch:
    """Spans of one stream, where one follows another: `record(what, begin, end)` in the order of `put`.

    What cannot be timed, because the device failed or the queue is full, is left out, and counted in `missed`.
    """

    def __init__(self, name: str, patience_s: float) -> None:
        self.missed = 0
        self._patience_s = patience_s
        self._spans: queue.Queue[tuple[Callable[[float, float], None], Moment, Moment]] = queue.Queue(_QUEUE)
        self._closing = threading.Event()
        self._end = 0.0  # of the span before
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, record: Callable[[float, float], None], begin: Moment, end: Moment) -> None:
        """A span from `begin`, but not before the one before it has ended, until `end`."""
        try:
            self._spans.put_nowait((record, begin, end))
        except queue.Full:
            self.missed += 1

    def close(self, timeout_s: float) -> None:
        """Times what is queued, if that takes no longer."""
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
            except (TimeoutError, DeviceError):  # the requests it belongs to learn of it from the sender
                self.missed += 1
                continue
            record(started, self._end)

    def _time(self, when: Moment) -> float:
        if isinstance(when, float):
            return when
        when.wait(self._patience_s)
        return time.monotonic()
