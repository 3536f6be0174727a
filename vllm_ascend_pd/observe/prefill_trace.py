# SPDX-License-Identifier: Apache-2.0
"""Writes what a prefill rank does to a trace file, if `trace_dir` is set."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.host_clock import HOST_CLOCK
from vllm_ascend_pd.core.observer import PrefillObserver, StepPart
from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.clock import measured_offset
from vllm_ascend_pd.observe.events import (
    Finished,
    FinishedEvent,
    Grant,
    GrantEvent,
    Layer,
    LayerEvent,
    Lost,
    LostEvent,
    Mark,
    MarkEvent,
    OffsetEvent,
    Part,
    Push,
    PushEvent,
    RegroupEvent,
    Regrouping,
    Step,
    StepEvent,
    TracedProcess,
    fingerprint,
    short_name,
)
from vllm_ascend_pd.observe.stopwatch import Stopwatch, moment
from vllm_ascend_pd.observe.trace_file import TraceFile

if TYPE_CHECKING:
    from vllm_ascend_pd.core.failure import PushFailure
    from vllm_ascend_pd.core.plan import Offsets
    from vllm_ascend_pd.core.prefill_ticket import RankKey
    from vllm_ascend_pd.core.protocol import ClockReading
    from vllm_ascend_pd.core.rank_info import RankInfo
    from vllm_ascend_pd.core.ticket import Ticket
    from vllm_ascend_pd.device.base import Event

_CLOSE_SHARE = 3  # of the time to close: two stopwatches and the file


def prefill_trace(config: ConnectorConfig, rank_info: RankInfo) -> PrefillTrace | None:
    """Returns the trace of a prefill rank, None if traces are off. Raises TraceError if it cannot be written."""
    if config.trace_dir is None:
        return None
    process = process_of("prefill rank", rank_info.engine_id, rank_info.pp_rank, rank_info.rank)
    file = TraceFile(config.trace_dir, process, config.trace_max_bytes)
    return PrefillTrace(file, config.collective_timeout_s + config.write_timeout_s)


def process_of(part: str, engine: str, pp_rank: int = 0, rank: int = 0) -> TracedProcess:
    unix_offset = time.time() - time.monotonic()
    return TracedProcess(events.FORMAT, part, short_name(engine), pp_rank, rank, HOST_CLOCK, unix_offset * 1e6)  # type: ignore[arg-type]


class PrefillTrace(PrefillObserver):
    """Traces a prefill rank. `patience_s`: how long a stream's work may take."""

    wants_clock = True

    def __init__(self, file: TraceFile, patience_s: float) -> None:
        self._file = file
        self._computing = Stopwatch("pd-trace-compute", patience_s)
        self._regrouping = Stopwatch("pd-trace-regroup", patience_s)
        self._compute_lane = file.lane("compute")
        self._regroup_lane = file.lane("regroup")
        self._control_lane = file.lane("control")
        self._step: Step | None = None  # the model's thread alone
        self._begun_at = 0.0
        self._first_begin = math.inf  # the stopwatch's
        self._uncertainty: dict[str, float] = {}  # by clock; the control thread alone

    def step_began(self, number: int, parts: Sequence[StepPart]) -> None:
        traced = tuple(
            Part(_request(part.ticket), _transfer(part.ticket), part.start, part.stop)
            for part in parts
            if part.start < part.stop
        )
        self._step = Step(number, traced) if traced else None
        self._begun_at = time.monotonic()

    def layer_computed(self, layer: str, computed: Event) -> None:
        if (step := self._step) is None:
            return

        def record(begin: float, end: float) -> None:
            self._first_begin = min(self._first_begin, begin)
            args = Layer(step.step, short_name(layer))
            self._span(LayerEvent(name=f"compute {args.layer}", tid=self._compute_lane, args=args), begin, end)

        self._computing.put(record, self._begun_at, moment(computed))

    def step_ended(self, computed: Event | None) -> None:
        step, self._step = self._step, None
        if step is None:
            return

        def record(begin: float, end: float) -> None:
            # All layers of the step have been timed by now.
            first, self._first_begin = min(self._first_begin, begin), math.inf
            self._span(StepEvent(name=f"step {step.step}", tid=self._compute_lane, args=step), first, end)

        self._computing.put(record, self._begun_at, time.monotonic() if computed is None else moment(computed))

    def regroup_submitted(self, layer: str, ticket_ids: Sequence[str], computed: Event, ready: Event) -> None:
        args = Regrouping(short_name(layer), tuple(map(fingerprint, ticket_ids)))

        def record(begin: float, end: float) -> None:
            self._span(RegroupEvent(name=f"regroup {args.layer}", tid=self._regroup_lane, args=args), begin, end)

        self._regrouping.put(record, moment(computed), moment(ready))

    def write_ended(
        self, layer: str, key: RankKey, begun_at: float, ticket_ids: Sequence[str], num_bytes: Offsets, total: int
    ) -> None:
        to = f"{key[0]}/{key[1]}"
        written = dict(zip(map(fingerprint, ticket_ids), num_bytes.tolist(), strict=True))
        args = Push(short_name(layer), to, written)
        lane = self._file.lane(f"push to decode rank {to}")
        self._span(PushEvent(name=f"push {args.layer}", tid=lane, args=args), begun_at, time.monotonic())

    def transfer_ended(self, ticket: Ticket, num_bytes: int, early_bytes: int, cause: PushFailure | None) -> None:
        failure = "" if cause is None else cause.value
        args = Finished(_request(ticket), _transfer(ticket), 0, num_bytes, early_bytes, failure)
        now = time.monotonic()
        self._span(FinishedEvent(name="finished", ph="i", tid=self._control_lane, args=args), now, now)

    def grant_answered(self, ticket: Ticket, key: RankKey, asked_at: float, renewal: bool, answer: str) -> None:
        args = Grant(_request(ticket), _transfer(ticket), f"{key[0]}/{key[1]}", answer)
        name = "grant renewed" if renewal else "grant"
        self._span(GrantEvent(name=name, tid=self._control_lane, args=args), asked_at, time.monotonic())

    def clock_read(self, asked_at: float, reading: ClockReading) -> None:
        now = time.monotonic()
        offset = measured_offset(asked_at, reading, now)
        if offset is not None and offset.uncertainty_us < self._uncertainty.get(offset.clock, math.inf):
            self._uncertainty = {**dict(list(self._uncertainty.items())[-1023:]), offset.clock: offset.uncertainty_us}
            self._file.put(OffsetEvent(name="clock", ph="M", ts=now * 1e6, args=offset))

    def transfer_reported(self, ticket: Ticket) -> None:
        now = time.monotonic()
        args = Mark(_request(ticket), _transfer(ticket))
        self._span(MarkEvent(name=events.TOLD, ph="i", tid=self._control_lane, args=args), now, now)

    def close(self, timeout_s: float) -> None:
        for stopwatch in (self._computing, self._regrouping):
            stopwatch.close(timeout_s / _CLOSE_SHARE)
            if stopwatch.missed:
                lost = Lost(stopwatch.missed, "they could not be timed")
                self._file.put(LostEvent(name="events lost", ph="i", ts=time.monotonic() * 1e6, args=lost))
        self._file.close(timeout_s / _CLOSE_SHARE)

    def _span(self, event: events.TraceEvent, begin: float, end: float) -> None:
        event.ts, event.dur = begin * 1e6, (end - begin) * 1e6
        self._file.put(event)


def _request(ticket: Ticket) -> str:
    return short_name(ticket.request_id)


def _transfer(ticket: Ticket) -> str:
    return fingerprint(ticket.ticket_id)
