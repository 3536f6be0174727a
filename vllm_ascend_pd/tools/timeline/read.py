# SPDX-License-Identifier: Apache-2.0
"""Reads trace files. They are untrusted, so sizes are bounded, and unreadable parts are reported."""

import os
import stat
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE, one_line
from vllm_ascend_pd.observe.trace_file import TraceError

FILE_PATTERN = "events-*.json"
MAX_LINE_BYTES = 4 << 20
MAX_EVENTS = 2_000_000
"""Maximum of all files together, about 2 GB of memory."""
_MAX_PROBLEM_CHARS = 1000

# Far above what engines write.
_Micros = Annotated[float, msgspec.Meta(ge=0, le=1e17)]
_Name = Annotated[str, msgspec.Meta(max_length=1200)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
_Id = Annotated[str, msgspec.Meta(max_length=64)]
_Many = msgspec.Meta(max_length=4096)


class PromptPart(msgspec.Struct, frozen=True):
    """Tokens `[start, stop)` of a request's prompt."""

    request: _Name
    transfer: _Id
    start: _Count
    stop: _Count


class EventArgs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an event is about. The comments say which categories have a field."""

    # Metadata: the name of a process or row.
    name: _Name = ""
    # The metadata of a process: what it is, and of which engine.
    part: Literal["", "prefill rank", "decode rank", "decode scheduler"] = ""
    engine: _Name = ""
    pp_rank: _Count = 0
    rank: _Count = 0
    # request, first, receive, grant, report: the request's id and the fingerprint of its ticket's.
    request: _Name = ""
    transfer: _Id = ""
    # first, placed: how many tokens the prompt has, and how many of them were not cached.
    tokens: _Count = 0
    # step: the prompts whose KV it completes.
    parts: Annotated[tuple[PromptPart, ...], _Many] = ()
    # layer, regroup, write.
    layer: _Name = ""
    # regroup.
    transfers: Annotated[tuple[_Id, ...], _Many] = ()
    # write: bytes by transfer, without those that failed.
    written: Annotated[dict[_Id, _Count], _Many] = msgspec.field(default_factory=dict)
    # write, grant: the decode rank.
    to: _Name = ""
    # grant: the type of the answer.
    answer: _Name = ""
    # report: what was written, and how much of it before the prompt's last layer was computed.
    bytes: _Count = 0
    early_bytes: _Count = 0
    # report, receive, request: why the transfer failed.
    failure: _Name = ""
    # lost: why.
    reason: _Name = ""
    # lost: how many events are missing.
    lost: _Count = 0


class TraceEvent(msgspec.Struct, omit_defaults=True):
    """A Chrome trace event."""

    name: _Name
    ph: Literal["X", "B", "E", "b", "n", "e", "i", "M"]
    ts: _Micros
    pid: _Count
    tid: _Count
    cat: _Name = ""
    dur: _Micros = 0
    id2: Annotated[dict[_Id, _Name], msgspec.Meta(max_length=2)] = msgspec.field(default_factory=dict)
    args: EventArgs = EventArgs()

    @property
    def end(self) -> float:
        return self.ts + self.dur


_decoder: msgspec.json.Decoder[TraceEvent] = msgspec.json.Decoder(TraceEvent)


class Recording(msgspec.Struct, frozen=True):
    """The trace of one process. `problems`: what is wrong with the file."""

    process: EventArgs
    events: list[TraceEvent]
    problems: tuple[str, ...]


def read_folder(folder: Path) -> tuple[list[Recording], list[str]]:
    """Returns all recordings, prefill's first, and what is wrong with files. Raises TraceError if there are none."""
    if not folder.is_dir():
        raise TraceError(f"{folder} is not a folder")
    files = sorted(folder.glob(FILE_PATTERN))
    if not files:
        raise TraceError(
            f"{folder} has no trace ({FILE_PATTERN}): name it as `trace_dir` in the kv_connector_extra_config of the "
            "prefill and decode engines, and send a request"
        )
    recordings: list[Recording] = []
    problems: list[str] = []
    left = MAX_EVENTS
    for file in files:
        try:
            recordings.append(read_file(file, left))
        except (TraceError, OSError) as error:
            problems.append(one_line(f"{file.name}: {error}", _MAX_PROBLEM_CHARS))
        else:
            left -= len(recordings[-1].events)
            problems += [one_line(f"{file.name}: {what}", _MAX_PROBLEM_CHARS) for what in recordings[-1].problems]
    if not recordings:
        raise TraceError(f"none of the {len(files)} files in {folder} is a trace; {problems[0]}")
    parts = ("prefill rank", "decode scheduler", "decode rank")
    recordings.sort(key=lambda r: (parts.index(r.process.part), r.process.engine, r.process.pp_rank, r.process.rank))
    return recordings, problems


def read_file(path: Path, max_events: int = MAX_EVENTS) -> Recording:
    """Raises TraceError for a file that does not begin like a trace, OSError for one that cannot be read."""
    events: list[TraceEvent] = []
    problems: list[str] = []
    broken, first_broken, number = 0, "", 1
    # O_NONBLOCK: opening a pipe must not block.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise TraceError("is not a regular file")
        if file.readline(16) != b"[\n":
            raise TraceError("is not a trace: its first line is not `[`")
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise TraceError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
            if line == b"]\n":
                break
            if len(events) >= max_events:
                problems.append(f"the rest is left out: all files together have more than {MAX_EVENTS} events")
                break
            try:
                event = _decoder.decode(line.strip().removesuffix(b","))
            except UNREADABLE as error:
                if not line.endswith(b"\n"):
                    problems.append(f"ends in the middle of line {number}, as of a process that was killed")
                    break
                broken += 1
                first_broken = first_broken or f"line {number}: {one_line(str(error), 200)}"
                continue
            events.append(event)
            if event.cat == "lost":
                problems.append(f"{event.args.lost or 'all further'} events were lost: {event.args.reason}")
    if broken:
        problems.append(f"{broken} lines cannot be read; the first is {first_broken}")
    if not events or events[0].name != "process_name" or not events[0].args.part:
        raise TraceError("does not say what wrote it" + (f"; {first_broken}" if first_broken else ""))
    return Recording(events[0].args, events, tuple(problems[:20]))
