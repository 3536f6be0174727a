# SPDX-License-Identifier: Apache-2.0
"""The trace file of one process: events in Chrome's trace format, as a JSON array with one event per line.

https://ui.perfetto.dev and chrome://tracing open such files. They do not need the array's end, so the file of a process
that was killed can be read, too. Times are whole microseconds of unix time.
"""

import contextlib
import itertools
import logging
import os
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from vllm_ascend_pd.device.event import Event

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
"""A rank writes about 0.5 KB for each layer of each step. So this is enough for some 2,000 steps of 60 layers."""
MAX_QUEUED = 65536
"""Most events that wait to be written or for the device: two seconds of a busy rank, at most 40 MB."""
_WRITE_EVERY_S = 0.1
"""A process that is killed loses the events of this time."""
_POLL_S = 0.0002
"""How often device events are looked at. A layer takes a millisecond or more."""
_LAST_BYTES = 1024
"""Reserved for the event that says that the file is full, and for the array's end."""

Moment = float | Event
"""Seconds of the monotonic clock, or a device event that has not happened yet."""


class TraceError(ValueError):
    """A trace cannot be written or read."""


def moment(event: Event) -> Moment:
    """Returns the current time if the event has happened, else the event."""
    return time.monotonic() if event.is_done() else event


@dataclass(slots=True)
class Traced:
    """An event, before it has a place in a file."""

    name: str
    # X: a span. B and E: the ends of a span that has others inside. b and e: the ends of one that is named by `id`,
    # and may overlap others. i: an instant, in a row.
    ph: Literal["X", "B", "E", "b", "e", "i"]
    # Determines which `args` there are. `tools/timeline/read.py` lists them.
    cat: str
    args: dict[str, Any]
    # The name of its row.
    row: str = ""
    # Tells apart what overlaps in this process.
    id: str = ""
    # A span has both. Other events have an `end` only.
    end: Moment = field(default_factory=time.monotonic)
    begin: Moment | None = None
    # Whether it is work of the device stream that its row shows. Such work does not overlap: it begins when the work
    # before it ends, or at `begin` if that is later.
    on_stream: bool = False


@dataclass(slots=True)
class _Stream:
    # Work that is not known to be over, in the stream's order.
    waiting: deque[Traced] = field(default_factory=deque)
    # When the work before it ended.
    end: float = 0.0


class TraceFile:
    """Creates the file and starts the thread that writes it. Raises TraceError if the file cannot be created.

    A file that reaches its maximum size ends. An event in it says so, and how many events did not fit into the queue.
    """

    def __init__(
        self, folder: str, process: dict[str, Any], max_bytes: int = MAX_FILE_BYTES, max_queued: int = MAX_QUEUED
    ) -> None:
        """`process`: args of the event that says what this process is."""
        who = re.sub(r"[^A-Za-z0-9_.-]", "_", process["name"][:120])
        self.path = Path(folder) / f"events-{who}-{os.getpid()}-{time.time_ns():x}.json"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise TraceError(f"no trace can be written to {folder}: {error.strerror}") from error
        # Any thread appends, the file's thread takes.
        self._queue: deque[Traced] = deque()
        self._max_queued = max_queued
        # Counts events that did not fit. Under the lock.
        self._lost = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        # `close` sets it: when the thread must end.
        self._deadline: float | None = None
        # The thread sets it: nothing is written any more.
        self._ended = False
        # The rest belongs to the thread.
        self._pid = os.getpid()
        self._unix_offset = _unix_offset()
        self._room = max_bytes - _LAST_BYTES
        self._lines: list[bytes] = []
        self._separator = b"[\n"
        self._streams: dict[str, _Stream] = {}
        self._num_waiting = 0  # `put` reads it
        # By name: the row's number, and the end of its latest span in unix microseconds.
        self._rows: dict[str, tuple[int, int]] = {}
        self._add_line("process_name", "M", 0, args=process)
        self._thread = threading.Thread(target=self._run, name="pd-trace", daemon=True)
        self._thread.start()

    def put(self, event: Traced) -> None:
        """Appends an event. Any thread may call this. It does not block."""
        if len(self._queue) + self._num_waiting >= self._max_queued or self._ended:
            with self._lock:
                self._lost += 1
            return
        self._queue.append(event)
        if isinstance(event.end, Event):
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Waits until all that was appended is over and written. Takes `timeout_s` at most."""
        self._deadline = time.monotonic() + 0.8 * timeout_s  # the rest is for writing
        self._wake.set()
        self._thread.join(timeout_s)

    # The thread.

    def _run(self) -> None:
        write_at = 0.0
        try:
            while not self._ended:
                deadline = self._deadline
                self._advance()
                now = time.monotonic()
                if deadline is not None and (not self._num_waiting or now >= deadline):
                    self._add_lost(self._num_waiting, "the device has not done them")
                    break
                if now >= write_at:
                    self._write_lines()
                    write_at = now + _WRITE_EVERY_S
                if self._num_waiting:
                    time.sleep(_POLL_S)
                else:
                    self._wake.wait(_WRITE_EVERY_S)
                    self._wake.clear()
            self._write_lines()
            self._write(b"\n]\n")
        finally:
            self._ended = True
            with contextlib.suppress(OSError):
                os.close(self._file)

    def _advance(self) -> None:
        """Takes what was appended, and adds what is over to the lines."""
        for _ in range(len(self._queue)):
            event = self._queue.popleft()
            if event.on_stream:
                self._streams.setdefault(event.row, _Stream()).waiting.append(event)
                self._num_waiting += 1
            elif (times := _times(event, 0.0)) is not None:
                self._add(event, *times)
        now = time.monotonic()  # one time for all, so that events of one stream keep their order
        for stream in self._streams.values():
            while stream.waiting and (times := _times(stream.waiting[0], now)) is not None:
                event = stream.waiting.popleft()
                self._num_waiting -= 1
                begin = max(times[0], stream.end)
                stream.end = max(times[1], begin)
                self._add(event, begin, stream.end)

    def _add(self, event: Traced, begin: float, end: float) -> None:
        """Adds an event to the lines. `begin` and `end`: on the monotonic clock."""
        ts, until = (round((at + self._unix_offset) * 1e6) for at in (begin, end))
        more: dict[str, Any] = {"cat": event.cat}
        if event.ph == "X":
            more["dur"] = until - ts
        if event.id:
            more["id2"] = {"local": event.id}  # "local": other processes may have the same
        tid = self._row(event, ts, until) if event.row else 0
        self._add_line(event.name, event.ph, ts if event.ph == "X" else until, tid=tid, **more, args=event.args)

    def _row(self, event: Traced, begin: int, end: int) -> int:
        """Returns the number of the event's row. Where spans overlap, there are several rows of one name."""
        copies = (event.row if copy == 1 else f"{event.row} ({copy})" for copy in itertools.count(1))
        name = next(name for name in copies if event.ph != "X" or self._rows.get(name, (0, 0))[1] <= begin)
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1, 0
            self._add_line("thread_name", "M", 0, tid=self._rows[name][0], args={"name": name})
        number, last_end = self._rows[name]
        self._rows[name] = number, end if event.ph == "X" else last_end
        return number

    def _add_line(self, name: str, ph: str, ts: int, *, tid: int = 0, **more: Any) -> None:
        if self._ended:
            return
        line = msgspec.json.encode({"name": name, "ph": ph, "ts": ts, "pid": self._pid, "tid": tid, **more})
        self._room -= len(line) + len(self._separator)
        if self._room < 0:
            logger.warning("%s: the trace has reached its maximum size and ends here", self.path)
            self._room = _LAST_BYTES
            self._add_line("events lost", "i", ts, cat="lost", args={"reason": "the file has reached its maximum size"})
            self._ended = True
            return
        self._lines.append(self._separator + line)
        self._separator = b",\n"

    def _add_lost(self, lost: int, reason: str) -> None:
        if lost and not self._ended:
            logger.warning("%s: %d events were lost: %s", self.path, lost, reason)
            now = time.monotonic()
            self._add(Traced("events lost", "i", "lost", {"lost": lost, "reason": reason}), now, now)

    def _write_lines(self) -> None:
        with self._lock:
            lost, self._lost = self._lost, 0
        self._add_lost(lost, "they came faster than they are written")
        lines, self._lines = self._lines, []
        self._write(b"".join(lines))

    def _write(self, data: bytes) -> None:
        """Writes to the file. An error, such as a full disk, ends the trace but not the engine."""
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if not self._ended:
                logger.error("%s: the trace ends here: %s", self.path, error.strerror)
            self._ended = True


def _times(event: Traced, now: float) -> tuple[float, float] | None:
    """Returns when an event begins and ends; None if it is not over. What is found to have happened happened `now`."""
    if isinstance(event.begin, Event) and event.begin.is_done():
        event.begin = now
    if isinstance(event.end, Event) and event.end.is_done():
        event.end = now
    if isinstance(event.begin, Event) or isinstance(event.end, Event):
        return None
    return (event.end if event.begin is None else event.begin), event.end


def _unix_offset() -> float:
    """Returns unix time minus the monotonic clock's time, in seconds."""
    readings = [(time.monotonic(), time.time(), time.monotonic()) for _ in range(5)]
    before, unix, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return unix - (before + after) / 2
