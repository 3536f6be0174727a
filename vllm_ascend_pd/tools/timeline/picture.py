# SPDX-License-Identifier: Apache-2.0
"""The rows and bars of a timeline, for both the PNG and the page."""

import dataclasses
import re
from collections.abc import Iterable

from vllm_ascend_pd.observe.events import LayerEvent, PushEvent, RegroupEvent, StepEvent
from vllm_ascend_pd.tools.timeline.merge import Timeline
from vllm_ascend_pd.tools.timeline.read import Recording
from vllm_ascend_pd.tools.timeline.summary import Request

MAX_BARS = 50_000


@dataclasses.dataclass(frozen=True)
class Bar:
    """A span, in microseconds.

    `layer` is its number among all layers, or -1. `mine`: it belongs to the request of the picture.
    """

    begin: float
    end: float
    layer: int
    label: str
    mine: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """`kind`: compute, regroup, push or request."""

    kind: str
    title: str
    bars: list[Bar]


@dataclasses.dataclass(frozen=True)
class Arrival:
    """The share of the request's bytes that had arrived at a time."""

    at: float
    share: float


@dataclasses.dataclass(frozen=True)
class Picture:
    """`begin` and `end` are the time shown. `omitted` is the number of bars beyond the limit."""

    rows: list[Row]
    layers: list[str]
    request: Request
    arrivals: list[Arrival]
    begin: float
    end: float
    omitted: int


def paint(timeline: Timeline, requests: list[Request], request: Request) -> Picture:
    """Returns the picture of `request`, with rows of all processes and at most MAX_BARS bars, the request's first."""
    layers = sorted({name for r in timeline.recordings for name in _layers(r)}, key=natural)
    places = {name: place for place, name in enumerate(layers)}
    rows: list[Row] = []
    ranks = [recording for recording in timeline.recordings if recording.process.part == "prefill rank"]
    arriving: list[tuple[float, int]] = []
    engines = len({r.process.engine for r in ranks})
    for recording in ranks:
        process = recording.process
        who = f"P{process.rank}" if process.pp_rank == 0 else f"P{process.pp_rank}/{process.rank}"
        who += f" of {process.engine[:12]}" if engines > 1 else ""
        computed: list[Bar] = []
        regrouped: list[Bar] = []
        pushed: dict[str, list[Bar]] = {}
        rests: list[StepEvent] = []
        mine = {
            e.args.step
            for e in recording.events
            if isinstance(e, StepEvent) and any(part.transfer == request.transfer for part in e.args.parts)
        }
        for event in recording.events:
            if isinstance(event, LayerEvent):
                computed.append(_bar(event, places, event.args.step in mine))
            elif isinstance(event, StepEvent):
                rests.append(event)
            elif isinstance(event, RegroupEvent):
                regrouped.append(_bar(event, places, request.transfer in event.args.transfers))
            elif isinstance(event, PushEvent):
                bar = _bar(event, places, request.transfer in event.args.bytes)
                pushed.setdefault(event.args.to, []).append(bar)
                arriving.append((event.end, event.args.bytes.get(request.transfer, 0)))
        last_of: dict[int, float] = {}
        for event in recording.events:
            if isinstance(event, LayerEvent):
                last_of[event.args.step] = max(event.end, last_of.get(event.args.step, 0.0))
        for step in rests:  # after the last layer's KV
            number = step.args.step
            computed.append(Bar(last_of.get(number, step.ts), step.end, -1, "", number in mine))
        rows.append(Row("compute", f"{who} computes", sorted(computed, key=lambda bar: bar.begin)))
        if regrouped:
            rows.append(Row("regroup", f"{who} regroups", regrouped))
        for to, bars in sorted(pushed.items()):
            rank = to.removeprefix("0/")
            rows.append(Row("push", f"{who} pushes to D{rank}", bars))
    waits = [
        Bar(one.issued, one.ready, -1, one.name, one.transfer == request.transfer)
        for one in requests
        if one.issued is not None and one.ready is not None
    ]
    rows.append(Row("request", "D has received", waits))
    rows, omitted = _bounded(rows)
    begin, end = _window(request)
    return Picture(rows, layers, request, _arrivals(arriving), begin, end, omitted)


def headline(request: Request) -> str:
    """Returns the result in one line."""
    if request.early_share is None or request.compute_end is None:
        return f"request {request.name[:60]}"
    text = f"{request.early_share:.0%} of the KV was in decode's cache when prefill's forward pass ended"
    if request.ready is not None:
        after = (request.ready - request.compute_end) / 1000
        text += f"; decode was ready {abs(after):.1f} ms {'later' if after >= 0 else 'earlier'}"
    return text


def explanation(picture: Picture) -> str:
    request = picture.request
    shown = f"{request.bytes / (1 << 20):.1f} MiB of KV in {len(picture.layers)} layers"
    return f"{shown}. One colour is one layer, with its number: computed, then on its way to decode while others are."


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 10 after layer 9."""
    return [(int(part[:18]), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def short_layer(name: str) -> str:
    """Returns a layer's number."""
    numbers = re.findall(r"[0-9]+", name)
    return numbers[0][:6] if numbers else name[:12]


def _layers(recording: Recording) -> Iterable[str]:
    return (e.args.layer for e in recording.events if isinstance(e, LayerEvent | RegroupEvent | PushEvent))


def _bar(event: LayerEvent | RegroupEvent | PushEvent, places: dict[str, int], mine: bool) -> Bar:
    layer = event.args.layer
    return Bar(event.ts, event.end, places[layer], short_layer(layer), mine)


def _bounded(rows: list[Row]) -> tuple[list[Row], int]:
    total = sum(len(row.bars) for row in rows)
    if total <= MAX_BARS:
        return rows, 0
    left = MAX_BARS
    kept = []
    for row in rows:
        bars = sorted(row.bars, key=lambda bar: not bar.mine)[: MAX_BARS // len(rows)]
        left -= len(bars)
        kept.append(dataclasses.replace(row, bars=sorted(bars, key=lambda bar: bar.begin)))
    return kept, total - (MAX_BARS - left)


def _arrivals(arriving: list[tuple[float, int]]) -> list[Arrival]:
    total = sum(num_bytes for _, num_bytes in arriving)
    arrived = 0
    found = []
    for at, num_bytes in sorted(arriving):
        if num_bytes:
            arrived += num_bytes
            found.append(Arrival(at, arrived / total))
    return found


def _window(request: Request) -> tuple[float, float]:
    """Returns the time to show: from the first layer or the ticket until decode is ready, with a margin."""
    begin, end = request.begin or 0.0, request.end or 1.0
    if request.compute_begin is not None and request.compute is not None and request.queue is not None:
        begin = max(begin, request.compute_begin - 0.25 * request.compute)
    margin = max(0.02 * (end - begin), 1.0)
    return begin - margin, end + 4 * margin  # room for the label "decode ready"
