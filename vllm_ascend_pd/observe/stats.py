# SPDX-License-Identifier: Apache-2.0
"""The connector's metrics, what they count, and how the figures of threads, ranks and steps add up.

The listeners at the end of this file record into a `Stats`, from any thread. A step takes what was recorded as plain
data of bounded size. `merged` adds up the data of ranks and steps:

    {"counters": {name: {reason: sum}},            "" where a counter has no reasons
     "histograms": {name: [[count], [sum]]},       by bucket
     "gauges": {name: {rank: value}}}              "" where a gauge is the engine's
"""

from __future__ import annotations

import math
import operator
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_ascend_pd.core.observer import (
    KvVerified,
    LayerWritten,
    Observed,
    Observer,
    OutcomeReported,
    PostRetried,
    PrefillStatus,
    PromptPlaced,
    PushDelayed,
    PushRefused,
    ReceiveEnded,
    ReceiveFailed,
    RegroupAwaited,
    ThresholdSet,
    TicketIssued,
    WriteEnded,
    WriteRetried,
)
from vllm_ascend_pd.core.reasons import BY_DECODE_FOR, BY_PREFILL_FOR, PushFailure, ReceiveFailure, Verified

if TYPE_CHECKING:
    from vllm_ascend_pd.core.topology import RankInfo

Data: TypeAlias = dict[str, dict[str, Any]]

PREFIX = "vllm:kv_pd_"


@dataclass(frozen=True)
class Counter:
    """A metric that only grows."""

    # Without vLLM's prefix, see `PREFIX`.
    name: str
    # What Prometheus shows.
    help: str
    # All values of its label `reason`, if it has one. If it has several labels: all their values, joined by commas.
    reasons: tuple[str, ...] = ("",)
    # Names of its labels, if it has any.
    label_names: tuple[str, ...] = ("reason",)

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self.reasons == ("",) else self.label_names


@dataclass(frozen=True)
class Histogram:
    """A metric of counts and sums of values, by bucket."""

    name: str
    help: str
    # Upper bounds of its buckets, ascending, without the last, infinite one.
    bounds: tuple[float, ...]
    reasons = ("",)
    labels = ()


@dataclass(frozen=True)
class Gauge:
    """A metric with a value for each rank. The rank is its label, because several API servers may each see only some
    changes.
    """

    name: str
    help: str
    # False: it is a value of the engine, without a label.
    by_rank: bool = True

    @property
    def labels(self) -> tuple[str, ...]:
        return ("rank",) if self.by_rank else ()


Metric: TypeAlias = Counter | Histogram | Gauge

# A layer of a short prompt over a fast link takes less than a millisecond, one of a long prompt over TCP a second.
_LAYER_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# Prefill waits in its queue and computes in between.
_REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

PUSHED_BYTES = Counter("pushed_bytes", "KV bytes written to decode engines and acknowledged.")
LAYER_PUSH_SECONDS = Histogram(
    "layer_push_seconds",
    "Time to write one layer of a step to one decode engine, for each rank and layer.",
    _LAYER_SECONDS,
)
REGROUP_WAIT_SECONDS = Histogram(
    "regroup_wait_seconds",
    "Time for which the writing of a computed layer waited for its regrouping, for each rank and regrouped layer.",
    _LAYER_SECONDS,
)
BACKPRESSURE_SECONDS = Histogram(
    "backpressure_seconds",
    "Time for which the model waited until a layer could be handed over: all staging slots were taken, or a sender's "
    "queue was full.",
    _LAYER_SECONDS,
)
PUSH_QUEUE_DEPTH = Gauge("push_queue_depth", "Layers that wait for the ones before them to be written.")
GRANTS_WAITING = Gauge("grants_waiting", "Transfers that wait for a decode engine's grants.")
RESTART_NEEDED = Gauge(
    "restart_needed",
    "1 where a rank's device, its exchange of KV heads or its transfer engine has failed for good: the engine must be "
    "restarted.",
)
PREFILL_FIRST_TOKENS = Gauge(
    "prefill_first_tokens",
    "Prompts of more tokens, which take several steps, may be computed before decode gives them memory. 0: none may.",
    by_rank=False,
)
OVERLAP_RATIO = Histogram(
    "overlap_ratio",
    "Share of a request's bytes that were written before prefill had computed its last layer, for each rank.",
    _SHARES,
)
WRITE_RETRIES = Counter("write_retries", "Writes that were made again, each for one request, after one had failed.")
PUSH_FAILURES = Counter(
    "push_failures",
    "Requests whose KV was not delivered, counted on each rank (reason ticket: once).",
    tuple(failure.value for failure in PushFailure),
)

TICKET_TO_READY_SECONDS = Histogram(
    "ticket_to_ready_seconds",
    "Time from issuing a ticket until all of the request's KV was there, waiting for prefill included.",
    _REQUEST_SECONDS,
)
TICKET_POST_RETRIES = Counter("ticket_post_retries", "Tickets that were posted to the metaserver again.")
RECEIVE_FAILURES = Counter(
    "receive_failures",
    "Requests whose KV was not received.",
    tuple(failure.value for failure in ReceiveFailure),
)
VERIFIED = Counter(
    "verified",
    "Requests whose KV was compared with prefill's checksums, counted on each rank.",
    tuple(result.value for result in Verified),
    ("result",),
)

_PLACES = tuple(
    f"{by},{reason}" for by, reasons in (("decode", BY_DECODE_FOR), ("prefill", BY_PREFILL_FOR)) for reason in reasons
)
PROMPTS = Counter(
    "prompts", "Prompts by who computed what decode had not cached of them, and why.", _PLACES, ("by", "reason")
)
PROMPT_TOKENS = Counter(
    "prompt_tokens", "Tokens of these prompts that decode had not cached.", _PLACES, ("by", "reason")
)
DECODE_PROMPT_THRESHOLD = Gauge(
    "decode_prompt_threshold_tokens",
    "Decode computes prompts of at most so many tokens, beyond its cache.",
    by_rank=False,
)
WAITING_BLOCKS = Gauge(
    "waiting_blocks", "Blocks of requests whose KV has not arrived, without those that were cached.", by_rank=False
)

PREFILL_METRICS: tuple[Metric, ...] = (
    PUSHED_BYTES,
    LAYER_PUSH_SECONDS,
    REGROUP_WAIT_SECONDS,
    BACKPRESSURE_SECONDS,
    PUSH_QUEUE_DEPTH,
    GRANTS_WAITING,
    RESTART_NEEDED,
    PREFILL_FIRST_TOKENS,
    OVERLAP_RATIO,
    WRITE_RETRIES,
    PUSH_FAILURES,
)
DECODE_METRICS: tuple[Metric, ...] = (
    TICKET_TO_READY_SECONDS,
    TICKET_POST_RETRIES,
    RECEIVE_FAILURES,
    VERIFIED,
    PROMPTS,
    PROMPT_TOKENS,
    DECODE_PROMPT_THRESHOLD,
    WAITING_BLOCKS,
)


# How many records are added up at a time. One by one, each layer would run this code with cold caches.
_NOTED_AT_ONCE = 64


class Stats:
    """Records from any thread. `rank`: the label of its gauges."""

    def __init__(self, rank: str = "") -> None:
        self._rank = rank
        # Recorded, and not added up yet: (metric, value, reason).
        self._noted: deque[tuple[Counter | Histogram, float, str]] = deque()
        # Guards the fields below.
        self._lock = threading.Lock()
        # Sums by name and reason.
        self._counters: dict[str, dict[str, int]] = {}
        # Counts and sums by bucket, by name.
        self._histograms: dict[str, tuple[list[int], list[float]]] = {}
        # Values that were taken last, by name.
        self._gauges: dict[str, int] = {}

    def add(self, metric: Counter | Histogram, value: float = 1, reason: str = "") -> None:
        """Adds to a counter, or a value to a histogram. Raises ValueError if `reason` is none of the metric's."""
        if reason not in metric.reasons:
            raise ValueError(f"{metric.name} has no reason {reason!r}")
        self._noted.append((metric, value, reason))
        if len(self._noted) >= _NOTED_AT_ONCE:
            self._add_up()

    def _add_up(self) -> None:
        with self._lock:
            for _ in range(len(self._noted)):
                metric, value, reason = self._noted.popleft()
                if isinstance(metric, Counter):
                    sums = self._counters.setdefault(metric.name, {})
                    sums[reason] = sums.get(reason, 0) + int(value)
                    continue
                of = self._histograms.get(metric.name)
                if of is None:
                    size = len(metric.bounds) + 1
                    of = self._histograms[metric.name] = ([0] * size, [0.0] * size)
                bucket = bisect_left(metric.bounds, value)
                of[0][bucket] += 1
                of[1][bucket] += value

    def take(self, gauges: Callable[[], Mapping[Gauge, int]] = dict) -> Data:
        """Returns what was recorded since the last call, and those of `gauges` that have changed; {} if nothing has.
        Gauges are read last, so that they no longer include what a counter says has ended. Only one thread takes."""
        data: Data = {}
        self._add_up()
        with self._lock:
            counters, self._counters = self._counters, {}
            histograms, self._histograms = self._histograms, {}
        if counters:
            data["counters"] = counters
        if histograms:
            data["histograms"] = {name: list(of) for name, of in histograms.items()}
        for gauge, value in gauges().items():
            if self._gauges.get(gauge.name, 0) != value:
                self._gauges[gauge.name] = value
                data.setdefault("gauges", {})[gauge.name] = {self._rank: value}
        return data


def merged(earlier: Data, later: Data) -> Data:
    """Returns the sums of both, and the later values of gauges. Changes neither."""
    both: Data = {kind: dict(of) for kind, of in earlier.items()}
    for kind, of in later.items():
        mine = both.setdefault(kind, {})
        for name, value in of.items():
            mine[name] = _MERGE[kind](mine[name], value) if name in mine else value
    return both


def _added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {reason: a.get(reason, 0) + b.get(reason, 0) for reason in {**a, **b}}


def _added_by_bucket(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    return [[x + y for x, y in zip(mine, other, strict=True)] for mine, other in zip(a, b, strict=True)]


_MERGE: dict[str, Any] = {"counters": _added, "histograms": _added_by_bucket, "gauges": operator.or_}


def observations(histogram: Histogram, counts: list[int], sums: list[float]) -> Iterator[tuple[float, int]]:
    """Yields (value, how often), for clients that take single values only. Each value is its bucket's mean, so buckets
    and sum equal those of the observed values.
    """
    edges = (-math.inf, *histogram.bounds, math.inf)
    for bucket, (count, total) in enumerate(zip(counts, sums, strict=True)):
        if count:  # rounding may have moved a mean across its bucket's edge
            above = math.nextafter(edges[bucket], math.inf) if bucket else -math.inf
            yield min(max(total / count, above), edges[bucket + 1]), count


class PrefillStats(Observer):
    """The metrics of a prefill rank. Any thread records, one thread takes."""

    def __init__(self, rank_info: RankInfo) -> None:
        self._stats = Stats(f"{rank_info.pp_rank}/{rank_info.rank}")

    def take(self, status: Callable[[], PrefillStatus]) -> Data:
        """Returns what was recorded since the last call. `status` is asked last, so a reader who sees that a transfer
        ended sees gauges without it.
        """

        def gauges() -> dict[Gauge, int]:
            now = status()
            return {
                PUSH_QUEUE_DEPTH: now.queued_tasks,
                GRANTS_WAITING: now.ungranted_transfers,
                RESTART_NEEDED: int(now.restart_needed),
            }

        return self._stats.take(gauges)

    def on(self, event: Observed) -> None:
        match event:
            case WriteEnded():
                self._stats.add(PUSHED_BYTES, sum(event.num_bytes))
            case LayerWritten():
                self._stats.add(LAYER_PUSH_SECONDS, event.seconds)
            case RegroupAwaited():
                self._stats.add(REGROUP_WAIT_SECONDS, event.seconds)
            case PushDelayed():
                self._stats.add(BACKPRESSURE_SECONDS, event.seconds)
            case WriteRetried():
                self._stats.add(WRITE_RETRIES)
            case OutcomeReported(cause=None, num_bytes=num_bytes) if num_bytes:
                self._stats.add(OVERLAP_RATIO, event.early_bytes / num_bytes)
            case OutcomeReported(cause=PushFailure() as cause):
                self._stats.add(PUSH_FAILURES, reason=cause.value)


class PrefillSchedulerStats(Stats, Observer):
    """The metrics of a prefill engine's scheduler."""

    def on(self, event: Observed) -> None:
        if isinstance(event, PushRefused):
            self.add(PUSH_FAILURES, reason=PushFailure.TICKET.value)


class DecodeSchedulerStats(Observer):
    """The metrics of a decode engine. Any thread records, one thread takes."""

    def __init__(self) -> None:
        self._stats = Stats()
        self._threshold = 0
        # Blocks that wait for KV, by ticket id. The scheduler's thread changes it, and takes.
        self._waiting_blocks: dict[str, int] = {}

    def take(self) -> Data:
        """Returns what was recorded since the last call."""
        waiting = sum(self._waiting_blocks.values())
        return self._stats.take(lambda: {DECODE_PROMPT_THRESHOLD: self._threshold, WAITING_BLOCKS: waiting})

    def on(self, event: Observed) -> None:
        match event:
            case PromptPlaced():
                place = f"{'decode' if event.by_decode else 'prefill'},{event.reason}"
                self._stats.add(PROMPTS, reason=place)
                self._stats.add(PROMPT_TOKENS, event.tokens, reason=place)
            case ThresholdSet():
                self._threshold = event.tokens
            case PostRetried():
                self._stats.add(TICKET_POST_RETRIES)
            case KvVerified():
                self._stats.add(VERIFIED, event.times, event.result)
            case ReceiveFailed():
                self._stats.add(RECEIVE_FAILURES, reason=event.cause.value)
            case TicketIssued():
                self._waiting_blocks[event.ticket.ticket_id] = event.blocks
            case ReceiveEnded():
                self._waiting_blocks.pop(event.ticket.ticket_id, None)
                if event.cause is None:
                    self._stats.add(TICKET_TO_READY_SECONDS, event.seconds)
