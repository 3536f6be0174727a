# SPDX-License-Identifier: Apache-2.0
"""Reads trace files. They are untrusted, so sizes are bounded, and unreadable parts are reported."""

import os
import stat
from pathlib import Path

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.observe.events import (
    FILE_PATTERN,
    FORMAT,
    ClockOffset,
    LaneEvent,
    LostEvent,
    OffsetEvent,
    ProcessEvent,
    TracedProcess,
    TraceEvent,
)
from vllm_ascend_pd.observe.trace_file import TraceError

MAX_FILES = 4096
MAX_LINE_BYTES = 4 << 20
MAX_PROBLEM_CHARS = 1000
MAX_EVENTS = 2_000_000
"""Maximum of all files together, about 2 GB of memory."""

_decoder: msgspec.json.Decoder[TraceEvent] = msgspec.json.Decoder(TraceEvent)


class Recording(msgspec.Struct, frozen=True):
    """The trace of one process. `lanes` has the names of its rows by number, `problems` what is wrong with the file."""

    file: str
    process: TracedProcess
    offsets: tuple[ClockOffset, ...]
    lanes: dict[int, str]
    events: list[TraceEvent]
    problems: tuple[str, ...]


def read_folder(folder: Path) -> tuple[list[Recording], list[str]]:
    """Returns all recordings and the problems of unreadable files. Raises TraceError if there is nothing to read."""
    try:
        files = sorted(folder.glob(FILE_PATTERN))
    except OSError as error:
        raise TraceError(f"{folder} cannot be read: {error.strerror}") from None
    if not folder.is_dir():
        raise TraceError(f"{folder} is not a folder")
    if not files:
        raise TraceError(
            f"{folder} has no trace ({FILE_PATTERN}): name it as `trace_dir` in the kv_connector_extra_config of the "
            "prefill and decode engines, and send a request"
        )
    if len(files) > MAX_FILES:
        raise TraceError(f"{folder} has {len(files)} traces, more than {MAX_FILES}")
    recordings: list[Recording] = []
    problems: list[str] = []
    left = MAX_EVENTS
    for file in files:
        try:
            recording = read_file(file, left)
        except TraceError as error:
            problems.append(one_line(f"{file.name}: {error}", MAX_PROBLEM_CHARS))
            continue
        left -= len(recording.events)
        problems += [one_line(f"{file.name}: {problem}", MAX_PROBLEM_CHARS) for problem in recording.problems]
        recordings.append(recording)
    if not recordings:
        raise TraceError(f"none of the {len(files)} files in {folder} is a trace; {problems[0]}")
    return recordings, problems


def read_file(path: Path, max_events: int) -> Recording:
    """Raises TraceError for a file that does not begin like a trace."""
    try:
        # Opening a pipe must not block.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}") from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise TraceError("is not a regular file")
        if file.readline(16) != b"[\n":
            raise TraceError("is not a trace: its first line is not `[`")
        process: TracedProcess | None = None
        offsets: list[ClockOffset] = []
        lanes: dict[int, str] = {}
        events: list[TraceEvent] = []
        problems: list[str] = []
        broken, first_broken = 0, ""
        number = 1
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
                if line.strip() not in (b"", b"]", b"{}]"):
                    problems.append(f"ends in the middle of line {number}, as of a process that was killed")
                break
            try:
                event = _decoder.decode(line.rstrip().removesuffix(b","))
            except UNREADABLE as error:
                broken += 1
                first_broken = first_broken or f"line {number}: {one_line(str(error), 200)}"
                continue
            if process is None:
                if not isinstance(event, ProcessEvent) or event.args.format != FORMAT:
                    raise TraceError(f"line {number} does not say what wrote it, in format {FORMAT}")
                process = event.args
            elif isinstance(event, OffsetEvent):
                offsets.append(event.args)
            elif isinstance(event, LaneEvent):
                lanes[event.tid] = event.args.name
            elif len(events) >= max_events:
                problems.append(f"the rest is left out: all files together have more than {MAX_EVENTS} events")
                break
            else:
                events.append(event)
                if isinstance(event, LostEvent):
                    problems.append(f"{event.args.events or 'all further'} events were lost: {event.args.why}")
        if broken:
            problems.append(f"{broken} lines cannot be read; the first is {first_broken}")
        if process is None:
            raise TraceError("does not say what wrote it" + (f"; {first_broken}" if first_broken else ""))
        return Recording(path.name, process, tuple(offsets), lanes, events, tuple(problems[:20]))
