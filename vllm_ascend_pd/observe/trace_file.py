# SPDX-License-Identifier: Apache-2.0
"""One process's trace file, written by a thread of its own: whoever traces only appends to a bounded queue."""

import contextlib
import itertools
import logging
import os
import re
import threading
import time
from collections import deque
from pathlib import Path

import msgspec

from vllm_ascend_pd.observe.events import (
    Lane,
    LaneEvent,
    Lost,
    LostEvent,
    ProcessEvent,
    TracedProcess,
    TraceEvent,
    short_name,
)

logger = logging.getLogger(__name__)

# Events that wait to be written: two seconds of a busy rank. It holds 10 MB at most.
QUEUE_EVENTS = 65536
# A process that is killed loses what happened in this time.
_WRITE_EVERY_S = 0.1
# The last event must fit behind the limit.
_LAST_WORDS_BYTES = 1024


class TraceError(ValueError):
    """A trace that cannot be written, or read."""


class TraceFile:
    """`max_bytes`: the file ends there, and says so. What does not fit into the queue is counted, and said in the
    file. Raises TraceError when the file cannot be made."""

    def __init__(self, folder: str, process: TracedProcess, max_bytes: int, queue_events: int = QUEUE_EVENTS) -> None:
        who = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{process.part} {process.engine[:80]}")
        name = f"events-{who}-{process.pp_rank}-{process.rank}-{os.getpid()}-{time.time_ns():x}.json"
        self.path = Path(folder) / name
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise TraceError(f"no trace can be written to {folder}: {error.strerror}") from error
        self._pid = os.getpid()
        self._room = max_bytes - _LAST_WORDS_BYTES
        self._queue: deque[TraceEvent] = deque()
        self._bound = queue_events
        self._lost = 0
        self._lock = threading.RLock()  # `lane` puts an event
        self._lanes: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._full = False
        self._closing = threading.Event()
        title = f"{process.part} {process.pp_rank}/{process.rank} of {process.engine}"
        self.put(ProcessEvent(name="process", ph="M", args=process))
        self.put(LaneEvent(name="process_name", ph="M", args=Lane(title)))
        self._encoder = msgspec.json.Encoder()
        self._write(b"[\n")
        self._thread = threading.Thread(target=self._run, name="pd-trace", daemon=True)
        self._thread.start()

    def put(self, event: TraceEvent) -> None:
        """Any thread. Neither waits nor wakes anybody up."""
        if len(self._queue) >= self._bound or self._full:
            with self._lock:
                self._lost += 1
            return
        event.pid = self._pid
        self._queue.append(event)

    def lane(self, name: str) -> int:
        """The row of that name, for an event's `tid`."""
        with self._lock:
            if name not in self._lanes:
                number = self._lanes[name] = next(self._numbers)
                self.put(LaneEvent(name="thread_name", ph="M", tid=number, args=Lane(short_name(name))))
            return self._lanes[name]

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, if that takes no longer."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing.wait(_WRITE_EVERY_S):
                self._write_queued()
            self._write_queued()
        finally:
            self._full = True
            with contextlib.suppress(OSError):
                os.close(self._file)

    def _write_queued(self) -> None:
        lines = []
        while self._queue and not self._full:
            line = self._encoder.encode(self._queue.popleft()) + b",\n"
            if len(line) > self._room:
                self._full = True
                logger.warning("%s: the trace is as long as it may get, and ends here", self.path)
                lines.append(self._encoder.encode(self._loss(0, "the file is as long as it may get")) + b",\n")
                break
            self._room -= len(line)
            lines.append(line)
        self._write(b"".join(lines))
        if self._lost and not self._full:
            with self._lock:
                lost, self._lost = self._lost, 0
            logger.warning("%s: %d events were lost: they came faster than they are written", self.path, lost)
            self._queue.append(self._loss(lost, "they came faster than they are written"))

    def _loss(self, events: int, why: str) -> LostEvent:
        now = time.monotonic() * 1e6
        return LostEvent(name="events lost", ph="i", ts=now, pid=self._pid, args=Lost(events, why))

    def _write(self, data: bytes) -> None:
        """A disk that takes no more ends the trace, not the engine."""
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._full = True
            self._queue.clear()
            logger.error("%s: the trace ends here: %s", self.path, error.strerror)
