# SPDX-License-Identifier: Apache-2.0
"""Checks of timelines of any prefill and decode engines on one host."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from vllm_ascend_pd.observe.events import FinishedEvent, LayerEvent, PushEvent, RegroupEvent, StepEvent
from vllm_ascend_pd.tools.timeline.merge import Timeline, merge
from vllm_ascend_pd.tools.timeline.read import Recording, read_folder
from vllm_ascend_pd.tools.timeline.summary import Request, Span, summarize

ROUNDING_US = 0.5


def traced_requests(folder: Path, enough: Callable[[list[Request]], bool]) -> tuple[Timeline, list[Request]]:
    """As soon as that is enough, and no step under way: engines write what they trace a moment later, and decode may be
    ready before prefill's step has ended."""
    deadline = time.monotonic() + 30
    while True:
        recordings, _ = read_folder(folder)
        timeline = merge(recordings)
        requests = summarize(timeline)
        if enough(requests) and all(steps_ended(rank) for rank in prefill_ranks(timeline)):
            return timeline, requests
        assert time.monotonic() < deadline, requests
        time.sleep(0.2)


def steps_ended(rank: Recording) -> bool:
    begun = {event.args.step for event in rank.events if isinstance(event, LayerEvent)}
    return begun <= {event.args.step for event in rank.events if isinstance(event, StepEvent)}


def prefill_ranks(timeline: Timeline) -> list[Recording]:
    return [recording for recording in timeline.recordings if recording.process.part == "prefill rank"]


def nests_properly(
    timeline: Timeline, request: Request, layers: set[str], regroups: bool = False, exact: bool = True
) -> None:
    """On each prefill rank, every layer is computed once in each of the request's steps, one after the other and
    within the step; every layer is regrouped and pushed, after it was computed; all the bytes are among the pushes.
    `layers`: of all ranks. Not `exact`: computation ends when a thread has noticed, so a push may seem to be earlier.
    """
    seen: set[str] = set()
    for rank in prefill_ranks(timeline):
        steps = {
            event.args.step: event
            for event in rank.events
            if isinstance(event, StepEvent) and any(p.transfer == request.transfer for p in event.args.parts)
        }
        assert steps
        computed: dict[str, list[float]] = {}
        for number, step in steps.items():
            spans = [e for e in rank.events if isinstance(e, LayerEvent) and e.args.step == number]
            names = [event.args.layer for event in spans]
            assert len(set(names)) == len(names)
            seen |= set(names)
            follow_each_other([(event.ts, event.end) for event in spans])
            for event in spans:
                assert step.ts - ROUNDING_US <= event.ts <= event.end <= step.end + ROUNDING_US
                computed.setdefault(event.args.layer, []).append(event.end)
        follow_each_other([(event.ts, event.end) for event in rank.events if isinstance(event, StepEvent)])
        regrouped = [e for e in rank.events if isinstance(e, RegroupEvent) and request.transfer in e.args.transfers]
        pushed = [e for e in rank.events if isinstance(e, PushEvent) and request.transfer in e.args.bytes]
        assert bool(regrouped) == regroups
        follow_each_other([(event.ts, event.end) for event in regrouped])
        for events in (regrouped, pushed) if regroups else (pushed,):
            assert {event.args.layer for event in events} == set(computed)
            assert not exact or all(event.ts >= min(computed[event.args.layer]) - ROUNDING_US for event in events)
        finished = [e for e in rank.events if isinstance(e, FinishedEvent) and e.args.transfer == request.transfer]
        assert [event.args.failure for event in finished] == [""]
        assert sum(event.args.bytes[request.transfer] for event in pushed) == finished[0].args.bytes > 0
        assert max(event.end for event in pushed) <= finished[0].ts + ROUNDING_US
    assert seen == layers


def follow_each_other(spans: list[Span]) -> None:
    spans = sorted(spans)
    assert all(a[1] <= b[0] + ROUNDING_US for a, b in itertools.pairwise(spans))


def clocks_agree(timeline: Timeline) -> None:
    """Checks that every prefill rank has measured that it shares its clock with decode."""
    assert len({recording.process.clock for recording in timeline.recordings}) == 1
    for rank in prefill_ranks(timeline):
        assert rank.offsets
        for offset in rank.offsets:
            assert offset.clock == rank.process.clock
            assert abs(offset.offset_us) <= offset.uncertainty_us + ROUNDING_US
