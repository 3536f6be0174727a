# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank traces. Without a folder to trace to, all of it does nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.prefill_ticket import RankKey
from vllm_ascend_pd.core.protocol import Granted, Message
from vllm_ascend_pd.device.base import Event
from vllm_ascend_pd.observe import events
from vllm_ascend_pd.observe.clock import HOST_CLOCK, measured_offset
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
    Process,
    Push,
    PushEvent,
    RegroupEvent,
    Regrouping,
    Step,
    StepEvent,
    fingerprint,
    short_name,
)
from vllm_ascend_pd.observe.stopwatch import Stopwatch, moment
from vllm_ascend_pd.observe.trace_file import TraceFile

if TYPE_CHECKING:
    from vllm_ascend_pd.core.plan import Offsets
    from vllm_ascend_pd.core.rank_info import RankInfo
    from vllm_ascend_pd.core.step import Send
    from vllm_ascend_pd.prefill.layer_push import LayerPush
    from vllm_ascend_pd.prefill.transfer import Transfer

_CLOSE_SHARE = 3  # of the time to close: two stopwatches and the file


class PrefillTrace:
    """Nothing is traced."""

    wants_clock = False
    """Whether decode ranks are to say what time it is there."""

    # On the model's thread.

    def step_began(self, number: int, sends: Iterable[tuple[Send, Transfer]]) -> None:
        """The first layer is about to be computed; with `sends` empty nobody's KV becomes complete."""

    def layer_computed(self, layer: str, computed: Event) -> None:
        """`computed`: its KV is in the cache."""

    def regroups(self, push: LayerPush) -> None:
        """A push's regrouping was submitted, with its `staged.computed` and `ready`."""

    def step_ended(self, computed: Event | None) -> None:
        """The forward pass is over, or will be at `computed`, if prompts end in it."""

    # On the sender's thread.

    def pushed(self, push: LayerPush, key: RankKey, begun: float, num_bytes: Offsets, delivered: Sequence[int]) -> None:
        """A write has ended that has `begun`: `num_bytes` of each item, for those that were `delivered`."""

    def finished(self, transfer: Transfer) -> None:
        """No write follows."""

    # On the control thread.

    def answered(
        self, transfer: Transfer, key: RankKey, asked_at: float, answer: Message | Exception, renewal: bool
    ) -> None:
        """To a request for a grant, just now."""

    def told(self, transfer: Transfer) -> None:
        """Decode knows how it ended, or cannot be told."""

    def close(self, timeout_s: float) -> None:
        pass


def prefill_trace(config: ConnectorConfig, identity: RankInfo) -> PrefillTrace:
    """Raises TraceError when it cannot be written."""
    if config.trace_dir is None:
        return PrefillTrace()
    process = process_of("prefill rank", identity.engine_id, identity.pp_rank, identity.rank)
    file = TraceFile(config.trace_dir, process, config.trace_max_bytes)
    return TracedPrefill(file, config.collective_timeout_s + config.write_timeout_s)


def process_of(part: str, engine: str, pp_rank: int = 0, rank: int = 0) -> Process:
    unix_offset = time.time() - time.monotonic()
    return Process(events.FORMAT, part, short_name(engine), pp_rank, rank, HOST_CLOCK, unix_offset * 1e6)  # type: ignore[arg-type]


class TracedPrefill(PrefillTrace):
    """`patience_s`: how long a stream's work may take."""

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

    def step_began(self, number: int, sends: Iterable[tuple[Send, Transfer]]) -> None:
        parts = tuple(
            Part(_request(transfer), _transfer(transfer), send.start, send.stop)
            for send, transfer in sends
            if send.start < send.stop
        )
        self._step = Step(number, parts) if parts else None
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

    def regroups(self, push: LayerPush) -> None:
        assert push.staged is not None
        transfers = tuple(map(_transfer, push.step_transfer.transfers))
        args = Regrouping(short_name(push.layer), transfers)

        def record(begin: float, end: float) -> None:
            self._span(RegroupEvent(name=f"regroup {args.layer}", tid=self._regroup_lane, args=args), begin, end)

        self._regrouping.put(record, moment(push.staged.computed), moment(push.ready))

    def pushed(self, push: LayerPush, key: RankKey, begun: float, num_bytes: Offsets, delivered: Sequence[int]) -> None:
        to, transfers = f"{key[0]}/{key[1]}", push.step_transfer.transfers
        written = {_transfer(transfers[i]): int(num_bytes[i]) for i in delivered}
        args = Push(short_name(push.layer), to, written)
        lane = self._file.lane(f"push to decode rank {to}")
        self._span(PushEvent(name=f"push {args.layer}", tid=lane, args=args), begun, time.monotonic())

    def finished(self, transfer: Transfer) -> None:
        cause = transfer.state.cause
        args = Finished(
            _request(transfer),
            _transfer(transfer),
            transfer.ticket.attempt,
            transfer.num_bytes,
            transfer.bytes_at_end,
            "" if cause is None else cause.value,
        )
        now = time.monotonic()
        self._span(FinishedEvent(name="finished", ph="i", tid=self._control_lane, args=args), now, now)

    def answered(
        self, transfer: Transfer, key: RankKey, asked_at: float, answer: Message | Exception, renewal: bool
    ) -> None:
        now = time.monotonic()
        args = Grant(_request(transfer), _transfer(transfer), f"{key[0]}/{key[1]}", type(answer).__name__)
        name = "grant renewed" if renewal else "grant"
        self._span(GrantEvent(name=name, tid=self._control_lane, args=args), asked_at, now)
        if not isinstance(answer, Granted) or answer.clock is None:
            return
        offset = measured_offset(asked_at, answer.clock, now)
        if offset is not None and offset.uncertainty_us < self._uncertainty.get(offset.clock, math.inf):
            self._uncertainty = {**dict(list(self._uncertainty.items())[-1023:]), offset.clock: offset.uncertainty_us}
            self._file.put(OffsetEvent(name="clock", ph="M", ts=now * 1e6, args=offset))

    def told(self, transfer: Transfer) -> None:
        now = time.monotonic()
        args = Mark(_request(transfer), _transfer(transfer))
        self._span(MarkEvent(name=events.TOLD, ph="i", tid=self._control_lane, args=args), now, now)

    def close(self, timeout_s: float) -> None:
        for stopwatch in (self._computing, self._regrouping):
            stopwatch.close(timeout_s / _CLOSE_SHARE)
            if stopwatch.missed:
                lost = Lost(stopwatch.missed, "they could not be timed")
                self._file.put(LostEvent(name="events lost", ph="i", ts=time.monotonic() * 1e6, args=lost))
        self._file.close(timeout_s / _CLOSE_SHARE)

    def _span(self, event: events.Event, begin: float, end: float) -> None:
        event.ts, event.dur = begin * 1e6, (end - begin) * 1e6
        self._file.put(event)


def _request(transfer: Transfer) -> str:
    return short_name(transfer.ticket.request_id)


def _transfer(transfer: Transfer) -> str:
    return fingerprint(transfer.ticket.ticket_id)
