# SPDX-License-Identifier: Apache-2.0
"""Writes what happens on prefill and on decode to trace files, where `trace_dir` is set."""

import hashlib
import time
from functools import lru_cache, partial
from typing import Any, Literal

from vllm_ascend_pd.core.observer import (
    GrantAnswered,
    LayerComputed,
    Observed,
    Observer,
    OutcomeReported,
    PromptPlaced,
    ReceiveEnded,
    RegroupSubmitted,
    StepBegun,
    StepEnded,
    TicketClosed,
    TicketExpected,
    TicketIssued,
    WriteEnded,
    WritingEnded,
)
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.observe.trace_file import Moment, Traced, TraceFile, moment

_MAX_NAME = 300


# These three return None without a folder, and raise TraceError if the trace cannot be written.


def prefill_trace(folder: str | None, rank: RankInfo) -> "PrefillTrace | None":
    return PrefillTrace(_file(folder, "prefill rank", rank.engine_id, rank.pp_rank, rank.rank)) if folder else None


def decode_trace(folder: str | None, rank: RankInfo) -> "DecodeTrace | None":
    return DecodeTrace(_file(folder, "decode rank", rank.engine_id, rank.pp_rank, rank.rank)) if folder else None


def decode_scheduler_trace(folder: str | None, engine_id: str) -> "DecodeSchedulerTrace | None":
    return DecodeSchedulerTrace(_file(folder, "decode scheduler", engine_id)) if folder else None


def _file(folder: str, part: str, engine: str, pp_rank: int | None = None, rank: int = 0) -> TraceFile:
    engine = _name(engine)
    place = "" if pp_rank is None else f" {pp_rank}/{rank}"
    process = {"name": f"{part}{place} of {engine}", "part": part, "engine": engine}
    return TraceFile(folder, {**process, "pp_rank": pp_rank or 0, "rank": rank})


@lru_cache(maxsize=1024)  # each layer's write names all of its transfers
def fingerprint(ticket_id: str) -> str:
    """Names a transfer in traces, equally on both sides. It does not reveal the ticket's id, which is a secret."""
    return hashlib.blake2b(ticket_id.encode(), digest_size=8, person=b"pd-trace").hexdigest()


def _name(name: str) -> str:
    """Cleans a name from outside. Layers have their names from this engine's own model."""
    return one_line(name, _MAX_NAME)


_on_stream = partial(Traced, on_stream=True)


def _transfer(ticket: Ticket) -> dict[str, Any]:
    return {"request": _name(ticket.request_id), "transfer": fingerprint(ticket.ticket_id)}


class _Trace(Observer):
    """Writes to a trace file, which it closes."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def close(self, timeout_s: float) -> None:
        self._file.close(timeout_s)


class PrefillTrace(_Trace):
    """Traces a prefill rank."""

    def __init__(self, file: TraceFile) -> None:
        super().__init__(file)
        # These two belong to the model's thread. Whether the current step is traced, and when its latest work is done.
        self._in_step = False
        self._computed: Moment = 0.0

    def on(self, event: Observed) -> None:
        args: dict[str, Any]
        match event:
            case LayerComputed() if self._in_step:
                self._computed = end = moment(event.computed)
                name, args = f"compute {event.layer}", {"layer": event.layer}
                # It begins where the layer before it ends.
                self._file.put(_on_stream(name, "X", "layer", args, "compute", begin=0.0, end=end))
            case WriteEnded():
                rank = f"{event.key[0]}/{event.key[1]}"
                written = dict(zip(map(fingerprint, event.ticket_ids), event.num_bytes, strict=True))
                args = {"layer": event.layer, "to": rank, "written": written}
                name, row = f"write {event.layer}", f"write to decode rank {rank}"
                self._file.put(Traced(name, "X", "write", args, row=row, begin=event.begun_at))
            case RegroupSubmitted():
                args = {"layer": event.layer, "transfers": [*map(fingerprint, event.ticket_ids)]}
                begin, end = moment(event.computed), moment(event.ready)
                name = f"regroup {event.layer}"
                self._file.put(_on_stream(name, "X", "regroup", args, "regroup", begin=begin, end=end))
            case StepBegun():
                self._begin_step(event)
            case StepEnded() if self._in_step:
                self._in_step = False
                end = self._computed if event.computed is None else moment(event.computed)
                self._file.put(_on_stream("step", "E", "step", {}, "compute", end=end))
            case GrantAnswered():
                to = f"{event.key[0]}/{event.key[1]}"
                args = {**_transfer(event.ticket), "to": to, "answer": event.answer}
                name, id = "renew grant" if event.renewal else "wait for grant", f"{args['transfer']} {to}"
                self._file.put(Traced(name, "b", "grant", {}, id=id, end=event.asked_at))
                self._file.put(Traced(name, "e", "grant", args, id=id))
            case WritingEnded():
                self._file.put(Traced("report", "b", "report", {}, id=fingerprint(event.ticket.ticket_id)))
            case OutcomeReported():
                args = {**_transfer(event.ticket), "bytes": event.num_bytes, "early_bytes": event.early_bytes}
                args["failure"] = "" if event.cause is None else event.cause.value
                self._file.put(Traced("report", "e", "report", args, id=args["transfer"]))

    def _begin_step(self, event: StepBegun) -> None:
        traced = [
            {**_transfer(ticket), "start": send.start, "stop": send.stop}
            for ticket, send in event.parts
            if send.start < send.stop
        ]
        self._in_step = bool(traced)
        self._computed = time.monotonic()
        if traced:
            name = f"step {event.number}"
            self._file.put(_on_stream(name, "B", "step", {"parts": traced}, "compute", end=self._computed))


class DecodeTrace(_Trace):
    """Traces a decode rank."""

    def on(self, event: Observed) -> None:
        match event:
            case TicketExpected():
                self._put("b", event)
            case TicketClosed():
                self._put("e", event, failure="" if event.received else "not all was written")

    def _put(self, ph: Literal["b", "e"], event: TicketExpected | TicketClosed, **more: str) -> None:
        args = {"request": _name(event.request_id), "transfer": fingerprint(event.ticket_id), **more}
        self._file.put(Traced("receive", ph, "receive", args, id=args["transfer"]))


class DecodeSchedulerTrace(_Trace):
    """Traces the scheduler's side of a decode engine."""

    def on(self, event: Observed) -> None:
        match event:
            case PromptPlaced():
                by = "decode" if event.by_decode else "prefill"
                args = {"request": _name(event.request_id), "by": by, "reason": event.reason, "tokens": event.tokens}
                self._file.put(Traced(f"{by} computes", "i", "placed", args, row="prompts"))
            case TicketIssued():
                if event.computed_first is not None:
                    self._put_first(event.ticket, *event.computed_first)
                self._put("b", event.ticket, "")
            case ReceiveEnded():
                self._put("e", event.ticket, "" if event.cause is None else event.cause.value)

    def _put(self, ph: Literal["b", "e"], ticket: Ticket, failure: str) -> None:
        args = {**_transfer(ticket), "failure": failure}
        self._file.put(Traced(args["request"], ph, "request", args, id=args["transfer"]))

    def _put_first(self, ticket: Ticket, posted_at: float, computed_at: float) -> None:
        args: dict[str, Any] = {**_transfer(ticket), "tokens": ticket.num_tokens}
        name = "prefill computes first"
        self._file.put(Traced(name, "b", "first", args, id=args["transfer"], end=posted_at))
        self._file.put(Traced(name, "e", "first", args, id=args["transfer"], end=computed_at))
