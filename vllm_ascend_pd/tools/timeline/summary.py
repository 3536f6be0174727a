# SPDX-License-Identifier: Apache-2.0
"""Where the time of requests went, from the events of all processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.tools.timeline.read import Recording, TraceEvent

_MAX_NAMES = 16

Span = tuple[float, float]


@dataclass
class Request:
    """One transfer. Times are microseconds of unix time; None if no event says them."""

    # The fingerprint of its ticket's id.
    transfer: str
    # The request's ids on prefill and decode.
    names: list[str] = field(default_factory=list)
    # Tokens of the prompt, up to the last one whose KV prefill has computed for decode.
    prompt_tokens: int | None = None
    # From the intent until prefill had computed the prompt, if it was computed before decode took blocks.
    computed_first: Span | None = None
    # When decode took blocks, and issued the ticket.
    issued: float | None = None
    # When the last prefill rank got its first grant.
    granted: float | None = None
    # Steps of all ranks that completed its KV.
    computed: list[Span] = field(default_factory=list)
    # Writes of all ranks.
    written: list[Span] = field(default_factory=list)
    bytes: int = 0
    # The part of `bytes` that was written before the prompt's last layer was computed.
    early_bytes: int = 0
    # When decode could run the request.
    ready: float | None = None
    failures: set[str] = field(default_factory=set)

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
    def write_end(self) -> float | None:
        return max((end for _, end in self.written), default=None)

    @property
    def queue(self) -> float | None:
        return _between(self.issued, self.compute_begin)

    @property
    def window(self) -> Span:
        """Returns when its first event begins and its last one ends."""
        known = [self.issued, self.compute_begin, self.compute_end, self.write_end, self.ready]
        known += self.computed_first or ()
        times = [time for time in known if time is not None]
        return min(times, default=0.0), max(times, default=0.0)

    def is_named(self, name: str) -> bool:
        """Returns whether one of its ids, or its fingerprint, begins so."""
        return any(known.startswith(name) for known in (*self.names, self.transfer))

    def figures(self) -> dict[str, str]:
        """Returns the figures of the table by heading, as docs/timeline.md explains them. Times are milliseconds."""
        after = _between(self.compute_end, self.write_end)
        return {
            "prompt tokens": "-" if self.prompt_tokens is None else str(self.prompt_tokens),
            "computed first": _ms(None if self.computed_first is None else _between(*self.computed_first)),
            "to blocks": _ms(None if self.computed_first is None else _between(self.computed_first[0], self.issued)),
            "queue": _ms(self.queue),
            "to grant": _ms(_between(self.issued, self.granted)),
            "compute": _ms(_between(self.compute_begin, self.compute_end)),
            "push": _ms(covered(self.written) if self.written else None),
            "push after": _ms(None if after is None else max(0.0, after)),
            "early bytes": f"{self.early_bytes / self.bytes:.0%}" if self.bytes else "-",
            "to ready": _ms(_between(self.issued, self.ready)),
        }


def summarize(recordings: Sequence[Recording]) -> list[Request]:
    """Returns all transfers, in the order of their first event."""
    found: dict[str, Request] = {}

    def request(transfer: str, name: str = "") -> Request:
        one = found.setdefault(transfer, Request(transfer))
        name = one_line(name, 300)
        if name and name not in one.names and len(one.names) < _MAX_NAMES:
            one.names.append(name)
        return one

    for recording in recordings:
        first_grants: dict[tuple[str, str], float] = {}
        intended: dict[str, float] = {}
        step: TraceEvent | None = None
        for event in recording.events:
            args = event.args
            match event.cat, event.ph:
                case "step", "B":
                    step = event
                case "step", "E" if step is not None:
                    for part in step.args.parts:
                        one = request(part.transfer, part.request)
                        one.computed.append((step.ts, event.ts))
                        one.prompt_tokens = max(part.stop, one.prompt_tokens or 0)
                    step = None
                case "write", "X":
                    for transfer in args.written:
                        request(transfer).written.append((event.ts, event.end))
                case "grant", "e" if args.answer == "Granted":
                    first_grants.setdefault((args.transfer, args.to), event.ts)
                case "report", "e":
                    one = request(args.transfer, args.request)
                    one.bytes += args.bytes
                    one.early_bytes += args.early_bytes
                    if args.failure:
                        one.failures.add(one_line(args.failure, 300))
                case "receive", "b":
                    request(args.transfer, args.request)
                case "first", "b":
                    intended[args.transfer] = event.ts
                case "first", "e" if args.transfer in intended:
                    one = request(args.transfer, args.request)
                    one.computed_first, one.prompt_tokens = (intended[args.transfer], event.ts), args.tokens
                case "request", "b":
                    request(args.transfer, args.request).issued = event.ts
                case "request", "e" if args.failure:
                    request(args.transfer, args.request).failures.add(one_line(f"decode: {args.failure}", 300))
                case "request", "e":
                    request(args.transfer, args.request).ready = event.ts
        for (transfer, _), at in first_grants.items():
            one = request(transfer)
            one.granted = max(at, one.granted or 0.0)
    return sorted(found.values(), key=lambda one: one.window)


def covered(spans: Iterable[Span]) -> float:
    """Returns the time that at least one span covers."""
    total, until = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _ms(micros: float | None) -> str:
    return "-" if micros is None else f"{micros / 1000:.1f}"
