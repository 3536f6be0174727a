# SPDX-License-Identifier: Apache-2.0
"""Merges the recordings of several processes onto one clock."""

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_ascend_pd.observe.events import TracedProcess, TraceEvent
from vllm_ascend_pd.tools.timeline.read import Recording

_PARTS = ("prefill rank", "decode rank", "decode scheduler")


@dataclasses.dataclass(frozen=True)
class Shift:
    """What is added to a clock's times.

    `uncertainty_us` is None if no process has measured the clock. Then the shift follows from the hosts' unix time.
    """

    us: float
    uncertainty_us: float | None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Recordings whose times are microseconds since the first event. `shifts` is by clock."""

    recordings: list[Recording]
    shifts: Mapping[str, Shift]

    @property
    def clock_note(self) -> str:
        """Describes the accuracy of the clocks in a few words."""
        measured = [s.uncertainty_us for s in self.shifts.values() if s.uncertainty_us is not None]
        if len(measured) < len(self.shifts):
            return "clocks of some hosts were not compared: their times follow unix time, and may be wrong"
        if len(measured) == 1:
            return "all on one host's clock"
        return f"clocks of {len(measured)} hosts, aligned to within {max(measured) / 1000:.3f} ms"


def align(recordings: Sequence[Recording]) -> dict[str, Shift]:
    """Returns the shift of each clock to the clock of the first decode process, or else of the first process.

    Follows the measurements with the smallest uncertainty, as far as there are any.
    """
    clocks = {r.process.clock: r.process for r in recordings}
    reference = next((r.process.clock for r in recordings if r.process.part != "prefill rank"), next(iter(clocks)))
    edges: dict[str, dict[str, tuple[float, float]]] = {clock: {} for clock in clocks}
    for recording in recordings:
        ours = recording.process.clock
        for offset in recording.offsets:
            theirs = offset.clock
            if theirs == ours or theirs not in edges:
                continue
            if offset.uncertainty_us < edges[ours].get(theirs, (0.0, float("inf")))[1]:
                edges[ours][theirs] = (offset.offset_us, offset.uncertainty_us)
                edges[theirs][ours] = (-offset.offset_us, offset.uncertainty_us)
    shifts = {reference: Shift(0.0, 0.0)}
    reached = deque([reference])
    while reached:
        clock = reached.popleft()
        known = shifts[clock]
        for other, (offset_us, uncertainty_us) in edges[clock].items():
            if other not in shifts:
                # The other clock's time is this one's plus the offset, so the offset is subtracted.
                assert known.uncertainty_us is not None
                shifts[other] = Shift(known.us - offset_us, known.uncertainty_us + uncertainty_us)
                reached.append(other)
    for clock, process in clocks.items():
        if clock not in shifts:
            shifts[clock] = Shift(process.unix_offset_us - clocks[reference].unix_offset_us, None)
    return shifts


def merge(recordings: Sequence[Recording]) -> Timeline:
    """Sorts prefill's ranks before decode's, and lets times begin at 0."""
    shifts = align(recordings)
    ordered = sorted(recordings, key=lambda r: (_PARTS.index(r.process.part), r.process.engine, *_place(r.process)))
    begin = min((e.ts + shifts[r.process.clock].us for r in recordings for e in r.events), default=0.0)
    merged = []
    for recording in ordered:
        shift = shifts[recording.process.clock].us - begin
        moved = sorted((_moved(event, shift) for event in recording.events), key=lambda event: event.ts)
        merged.append(msgspec.structs.replace(recording, events=moved))
    return Timeline(merged, shifts)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Returns the trace for chrome://tracing and Perfetto."""
    events: list[Any] = []
    for pid, recording in enumerate(timeline.recordings, 1):
        named = [("process_name", 0, title(recording.process))]
        named += [("thread_name", tid, name) for tid, name in recording.lanes.items()]
        for kind, tid, name in named:
            events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})
        sort = {"sort_index": pid}
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": sort})
        for event in recording.events:
            event.pid = pid
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clocks": timeline.clock_note}}


def title(process: TracedProcess) -> str:
    if process.part == "decode scheduler":
        return f"decode scheduler, {process.engine}"
    rank = f"{process.rank}" if process.pp_rank == 0 else f"{process.pp_rank}/{process.rank}"
    return f"{process.part} {rank}, {process.engine}"


def _place(process: TracedProcess) -> tuple[int, int]:
    return process.pp_rank, process.rank


def _moved(event: TraceEvent, shift_us: float) -> TraceEvent:
    return msgspec.structs.replace(event, ts=event.ts + shift_us)
