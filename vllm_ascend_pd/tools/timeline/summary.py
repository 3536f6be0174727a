# SPDX-License-Identifier: Apache-2.0
"""Computes where a request's time went, from the events of all processes."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.events import (
    FinishedEvent,
    GrantEvent,
    MarkEvent,
    PushEvent,
    RegroupEvent,
    StepEvent,
    short_name,
)
from vllm_ascend_pd.tools.timeline.merge import Timeline

ELLIPSIS = "\u2026"
"""Replaces the omitted part of an id."""

_MAX_NAMES = 16

Span = tuple[float, float]


@dataclasses.dataclass
class Request:
    """One transfer. Times are in microseconds, None without an event.

    `names` are the request's ids on prefill and decode, the proxy's id first.
    """

    transfer: str
    names: list[str] = dataclasses.field(default_factory=list)
    prompt_tokens: int | None = None
    """Tokens of the prompt, up to the last one whose KV prefill has begun to compute for decode."""
    issued: float | None = None
    granted: float | None = None
    """Time at which the last rank got its first grant."""
    computed: list[Span] = dataclasses.field(default_factory=list)
    """Steps of all ranks that completed its KV."""
    regrouped: list[Span] = dataclasses.field(default_factory=list)
    pushed: list[Span] = dataclasses.field(default_factory=list)
    bytes: int = 0
    bytes_before_end: int = 0
    ready: float | None = None
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0] if self.names else self.transfer

    @property
    def compute_begin(self) -> float | None:
        return min((begin for begin, _ in self.computed), default=None)

    @property
    def compute_end(self) -> float | None:
        return max((end for _, end in self.computed), default=None)

    @property
    def push_end(self) -> float | None:
        return max((end for _, end in self.pushed), default=None)

    @property
    def begin(self) -> float | None:
        return min(_known(self.issued, self.compute_begin), default=None)

    @property
    def end(self) -> float | None:
        return max(_known(self.ready, self.push_end, self.compute_end), default=None)

    # Values of the table, in microseconds.

    @property
    def queue(self) -> float | None:
        """Time from the ticket until the first layer begins, in the proxy and in prefill's queue."""
        return _between(self.issued, self.compute_begin)

    @property
    def to_grant(self) -> float | None:
        return _between(self.issued, self.granted)

    @property
    def compute(self) -> float | None:
        return _between(self.compute_begin, self.compute_end)

    @property
    def push(self) -> float | None:
        """Time in which at least one rank pushed."""
        return covered(self.pushed) if self.pushed else None

    @property
    def push_after(self) -> float | None:
        """Time from the end of the forward pass until all was pushed."""
        after = _between(self.compute_end, self.push_end)
        return None if after is None else max(0.0, after)

    @property
    def early_share(self) -> float | None:
        """Share of the bytes that had arrived when the forward pass ended."""
        return self.bytes_before_end / self.bytes if self.bytes else None

    @property
    def to_ready(self) -> float | None:
        return _between(self.issued, self.ready)


def summarize(timeline: Timeline) -> list[Request]:
    """Returns all transfers in the traces, in the order of their first event."""
    found: dict[str, Request] = {}

    def request(transfer: str, name: str | None = None, first: bool = False) -> Request:
        one = found.setdefault(transfer, Request(transfer))
        name = None if name is None else short_name(name)  # again, because files are untrusted
        if name is not None and name not in one.names and len(one.names) < _MAX_NAMES:
            one.names.insert(0 if first else len(one.names), name)
        return one

    grants: dict[str, dict[tuple[int, str], float]] = {}
    for index, recording in enumerate(timeline.recordings):
        on_scheduler = recording.process.part == "decode scheduler"
        for event in recording.events:
            match event:
                case StepEvent(args=step):
                    for part in step.parts:
                        one = request(part.transfer, part.request, first=True)
                        one.computed.append((event.ts, event.end))
                        one.prompt_tokens = max(part.stop, one.prompt_tokens or 0)
                case RegroupEvent(args=regrouping):
                    for transfer in regrouping.transfers:
                        request(transfer).regrouped.append((event.ts, event.end))
                case PushEvent(args=push):
                    for transfer in push.bytes:
                        request(transfer).pushed.append((event.ts, event.end))
                case GrantEvent(args=grant) if grant.answer == "Granted":
                    request(grant.transfer, grant.request, first=True)
                    grants.setdefault(grant.transfer, {}).setdefault((index, grant.to), event.end)
                case FinishedEvent(args=done):
                    one = request(done.transfer, done.request, first=True)
                    one.bytes += done.bytes
                    one.bytes_before_end += done.bytes_before_end
                    if done.failure:
                        one.failures.append(short_name(done.failure))
                case MarkEvent(args=mark, name=what) if mark.transfer:
                    one = request(mark.transfer, mark.request, first=on_scheduler)
                    if what == events.ISSUED:
                        one.issued = event.ts
                    elif what == events.READY:
                        one.ready = event.ts
                    elif what == events.FAILED and on_scheduler:
                        one.failures.append("decode gave it up")
    for transfer, first in grants.items():
        found[transfer].granted = max(first.values())
    return sorted(found.values(), key=lambda one: (one.begin is None, one.begin or 0.0))


def chosen(requests: Sequence[Request], wanted: str | None) -> list[Request]:
    """Returns the requests with the id or fingerprint `wanted`, or all if it is None.

    An id may be shortened as in the table.
    """
    if wanted is None:
        return list(requests)
    exact = [one for one in requests if wanted in (one.transfer, *one.names)]
    if exact or ELLIPSIS not in wanted:
        return exact
    shortened = re.compile(".*".join(map(re.escape, wanted.split(ELLIPSIS))), re.DOTALL)
    return [one for one in requests if any(map(shortened.fullmatch, one.names))]


def covered(spans: Iterable[Span]) -> float:
    """Returns the time covered by at least one span."""
    return sum(end - begin for begin, end in union(spans))


def union(spans: Iterable[Span]) -> Iterator[Span]:
    """Yields spans that cover the same time without overlap."""
    current: Span | None = None
    for begin, end in sorted(spans):
        if current is None or begin > current[1]:
            if current is not None:
                yield current
            current = (begin, end)
        else:
            current = (current[0], max(current[1], end))
    if current is not None:
        yield current


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _known(*times: float | None) -> list[float]:
    return [time for time in times if time is not None]
