# SPDX-License-Identifier: Apache-2.0
"""The trace file of one process. A thread writes it; callers only append to a bounded queue."""

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

# Maximum number of queued events: two seconds of a busy rank, at most 10 MB.
QUEUE_EVENTS = 65536
# A process that is killed loses the events of this time.
_WRITE_EVERY_S = 0.1
# Reserved for the last event, which says that the file is full.
_LAST_WORDS_BYTES = 1024


class TraceError(ValueError):
    """A trace cannot be written or read."""


class TraceFile:
    """Creates the file and starts its thread. Raises TraceError if the file cannot be created.

    The file ends at `max_bytes`. An event in the file counts the events that did not fit into the queue.
    """

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
        self._lock = threading.RLock()  # reentrant, because `lane` calls `put`
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
        """Appends an event. Any thread may call this. It neither blocks nor wakes a thread."""
        if len(self._queue) >= self._bound or self._full:
            with self._lock:
                self._lost += 1
            return
        event.pid = self._pid
        self._queue.append(event)

    def lane(self, name: str) -> int:
        """Returns the row with that name, for an event's `tid`."""
        with self._lock:
            if name not in self._lanes:
                number = self._lanes[name] = next(self._numbers)
                self.put(LaneEvent(name="thread_name", ph="M", tid=number, args=Lane(short_name(name))))
            return self._lanes[name]

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, for at most `timeout_s`."""
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
                logger.warning("%s: the trace has reached its maximum size and ends here", self.path)
                lines.append(self._encoder.encode(self._loss(0, "the file has reached its maximum size")) + b",\n")
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
        """Writes to the file. An error, such as a full disk, ends the trace but not the engine."""
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._full = True
            self._queue.clear()
            logger.error("%s: the trace ends here: %s", self.path, error.strerror)
