# SPDX-License-Identifier: Apache-2.0
"""Checks of the traces of any prefill and decode engines on one host."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from vllm_ascend_pd.tools.timeline.read import Recording, TraceEvent, read_folder
from vllm_ascend_pd.tools.timeline.summary import Request, Span, summarize


def traced_requests(folder: Path, enough: Callable[[list[Request]], bool]) -> tuple[list[Recording], list[Request]]:
    """As soon as that is enough, and no step under way: engines write what they trace a moment later, and decode may be
    ready before prefill's step has ended."""
    deadline = time.monotonic() + 30
    while True:
        recordings, _ = read_folder(folder)
        requests = summarize(recordings)
        if enough(requests) and all(
            not step or step[-1][1] is not None for step in map(steps, prefill_ranks(recordings))
        ):
            return recordings, requests
        assert time.monotonic() < deadline, requests
        time.sleep(0.2)


def prefill_ranks(recordings: list[Recording]) -> list[Recording]:
    return [recording for recording in recordings if recording.process.part == "prefill rank"]


def steps(rank: Recording) -> list[tuple[TraceEvent, TraceEvent | None, list[TraceEvent]]]:
    """(begin, end, layers) of each step. None: it has not ended."""
    found: list[tuple[TraceEvent, TraceEvent | None, list[TraceEvent]]] = []
    for event in rank.events:
        if (event.cat, event.ph) == ("step", "B"):
            assert not found or found[-1][1] is not None
            found.append((event, None, []))
        elif (event.cat, event.ph) == ("step", "E"):
            found[-1] = (found[-1][0], event, found[-1][2])
        elif event.cat == "layer":
            assert found[-1][1] is None
            found[-1][2].append(event)
    return found


def nests_properly(
    recordings: list[Recording], request: Request, layers: set[str], regroups: bool = False, exact: bool = True
) -> None:
    """On each prefill rank, every layer is computed once in each of the request's steps, one after the other and
    within the step; every layer is regrouped and written, after it was computed; all the bytes are among the writes.
    `layers`: of all ranks. Not `exact`: computation ends when a thread has noticed, so a write may seem to be earlier.
    """
    seen: set[str] = set()
    for rank in prefill_ranks(recordings):
        computed: dict[str, list[float]] = {}
        for begin, end, of_step in steps(rank):
            if not any(part.transfer == request.transfer for part in begin.args.parts):
                continue
            names = [event.args.layer for event in of_step]
            assert names
            assert len(set(names)) == len(names)
            seen |= set(names)
            follow_each_other([(event.ts, event.end) for event in of_step])
            assert end is not None
            for event in of_step:
                assert begin.ts <= event.ts <= event.end <= end.ts
                computed.setdefault(event.args.layer, []).append(event.end)
        assert computed
        follow_each_other([(begin.ts, end.ts) for begin, end, _ in steps(rank) if end is not None])
        regrouped = [e for e in rank.events if e.cat == "regroup" and request.transfer in e.args.transfers]
        written = [e for e in rank.events if e.cat == "write" and request.transfer in e.args.written]
        assert bool(regrouped) == regroups
        follow_each_other([(event.ts, event.end) for event in regrouped])
        # A rank that regroups with others may have no unit to write.
        for events in (regrouped, *([written] if written else [])) if regroups else (written,):
            assert {event.args.layer for event in events} == set(computed)
            assert not exact or all(event.ts >= min(computed[event.args.layer]) - 1 for event in events)
        about = [e for e in rank.events if e.cat == "report" and e.ph == "e" and e.args.transfer == request.transfer]
        assert [event.args.failure for event in about] == [""]
        assert sum(event.args.written[request.transfer] for event in written) == about[0].args.bytes
        assert max((event.end for event in written), default=0) <= about[0].ts + 1
        assert any(e.cat == "grant" and e.args.transfer == request.transfer for e in rank.events)
    assert seen == layers
    assert sum(e.args.bytes for rank in prefill_ranks(recordings) for e in rank.events if e.cat == "report") > 0


def follow_each_other(spans: list[Span]) -> None:
    spans = sorted(spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def is_chrome_trace(path: Path, since_unix_s: float, closed: bool = True, ended: bool = True) -> list[dict]:
    """Checks that a file is a trace as Chrome's format defines it, and as Perfetto shows it without loss: what is
    required is there, times are microseconds of unix time, all that begins ends, and no spans of a row overlap but
    nested ones. Returns its events. Not `closed`: the file of a process that was killed. Not `ended`: of processes that
    may be in the middle of something."""
    text = path.read_text()
    events = json.loads(text if closed else text.rstrip(",\n") + "]")
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    open_steps: Counter[tuple[int, int]] = Counter()
    open_ids: Counter[tuple[str, str, int, str]] = Counter()
    named = {(e["pid"], e["tid"]) for e in events if e["name"] in ("process_name", "thread_name")}
    for event in events:
        assert event.keys() >= {"name", "ph", "ts", "pid", "tid", "args"}
        assert isinstance(event["pid"], int)
        place = event["pid"], event["tid"]
        assert place in named
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            continue
        assert event["cat"]
        assert since_unix_s * 1e6 <= event["ts"] <= time.time() * 1e6
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                assert event["ts"] + event["dur"] <= time.time() * 1e6
                rows.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
            case "B" | "E" as ph:
                open_steps[place] += 1 if ph == "B" else -1
                assert 0 <= open_steps[place] <= 1
            case "b" | "e" as ph:
                key = event["cat"], event["id2"]["local"], event["pid"], event["name"]
                open_ids[key] += {"b": 1, "e": -1}[ph]
                assert open_ids[key] >= 0
            case ph:
                assert ph == "i"
    for spans in rows.values():
        follow_each_other(spans)
    assert not (closed and ended) or not +open_steps
    assert not (closed and ended) or not +open_ids
    return events
