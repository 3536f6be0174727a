# SPDX-License-Identifier: Apache-2.0
"""Writes what happens on prefill and on decode to trace files, where `trace_dir` is set."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from vllm_ascend_pd.core.observer import (
    DecodeObserver,
    DecodeSchedulerObserver,
    PrefillObserver,
    ReceiveEnding,
)
from vllm_ascend_pd.core.prefill_ticket import RankKey
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.device.base import Event
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


def fingerprint(ticket_id: str) -> str:
    """Names a transfer in traces, equally on both sides. It does not reveal the ticket's id, which is a secret."""
    return hashlib.blake2b(ticket_id.encode(), digest_size=8, person=b"pd-trace").hexdigest()


def _name(name: str) -> str:
    return one_line(name, _MAX_NAME)


_on_stream = partial(Traced, on_stream=True)


def _transfer(request_id: str, ticket_id: str) -> dict[str, Any]:
    return {"request": _name(request_id), "transfer": fingerprint(ticket_id)}


class _Trace:
    """Writes to a trace file, which it closes."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def close(self, timeout_s: float) -> None:
        self._file.close(timeout_s)


class PrefillTrace(_Trace, PrefillObserver):
    """Traces a prefill rank."""

    def __init__(self, file: TraceFile) -> None:
        super().__init__(file)
        # These two belong to the model's thread. Whether the current step is traced, and when its latest work is done.
        self._in_step = False
        self._computed: Moment = 0.0

    def step_began(self, number: int, parts: Sequence[tuple[Ticket, Send]]) -> None:
        traced = [
            {**_transfer(ticket.request_id, ticket.ticket_id), "start": send.start, "stop": send.stop}
            for ticket, send in parts
            if send.start < send.stop
        ]
        self._in_step = bool(traced)
        self._computed = time.monotonic()
        if traced:
            self._file.put(_on_stream(f"step {number}", "B", "step", {"parts": traced}, "compute", end=self._computed))

    def layer_computed(self, layer: str, computed: Event) -> None:
        if self._in_step:
            layer, self._computed = _name(layer), moment(computed)
            # It begins where the layer before it ends.
            args = {"layer": layer}
            self._file.put(_on_stream(f"compute {layer}", "X", "layer", args, "compute", begin=0.0, end=self._computed))

    def step_ended(self, computed: Event | None) -> None:
        if self._in_step:
            self._in_step = False
            end = self._computed if computed is None else moment(computed)
            self._file.put(_on_stream("step", "E", "step", {}, "compute", end=end))

    def regroup_submitted(self, layer: str, ticket_ids: Sequence[str], computed: Event, ready: Event) -> None:
        args = {"layer": _name(layer), "transfers": [*map(fingerprint, ticket_ids)]}
        begin, end = moment(computed), moment(ready)
        self._file.put(_on_stream(f"regroup {_name(layer)}", "X", "regroup", args, "regroup", begin=begin, end=end))

    def write_ended(
        self, layer: str, key: RankKey, begun_at: float, ticket_ids: Sequence[str], num_bytes: Sequence[int]
    ) -> None:
        layer, rank = _name(layer), f"{key[0]}/{key[1]}"
        written = dict(zip(map(fingerprint, ticket_ids), num_bytes, strict=True))
        args = {"layer": layer, "to": rank, "written": written}
        row = f"write to decode rank {rank}"
        self._file.put(Traced(f"write {layer}", "X", "write", args, row=row, begin=begun_at))

    def grant_answered(self, ticket: Ticket, key: RankKey, asked_at: float, renewal: bool, answer: str) -> None:
        args = {**_transfer(ticket.request_id, ticket.ticket_id), "to": f"{key[0]}/{key[1]}", "answer": answer}
        name, id = "renew grant" if renewal else "wait for grant", f"{args['transfer']} {args['to']}"
        self._file.put(Traced(name, "b", "grant", {}, id=id, end=asked_at))
        self._file.put(Traced(name, "e", "grant", args, id=id))

    def transfer_ended(self, ticket: Ticket, num_bytes: int, early_bytes: int, cause: PushFailure | None) -> None:
        args = _transfer(ticket.request_id, ticket.ticket_id)
        args |= {"bytes": num_bytes, "early_bytes": early_bytes, "failure": "" if cause is None else cause.value}
        self._file.put(Traced("report", "b", "report", args, id=args["transfer"]))

    def transfer_reported(self, ticket: Ticket) -> None:
        self._file.put(Traced("report", "e", "report", {}, id=fingerprint(ticket.ticket_id)))


class DecodeTrace(_Trace, DecodeObserver):
    """Traces a decode rank."""

    def ticket_received(self, request_id: str, ticket_id: str) -> None:
        self._put("b", request_id, ticket_id)

    def ticket_ended(self, request_id: str, ticket_id: str, received: bool) -> None:
        self._put("e", request_id, ticket_id, failure="" if received else "not all was written")

    def _put(self, ph: Literal["b", "e"], request_id: str, ticket_id: str, **more: str) -> None:
        args = _transfer(request_id, ticket_id)
        self._file.put(Traced("receive", ph, "receive", {**args, **more}, id=args["transfer"]))


class DecodeSchedulerTrace(_Trace, DecodeSchedulerObserver):
    """Traces the scheduler's side of a decode engine."""

    def prompt_placed(self, request_id: str, by_decode: bool, reason: str, tokens: int) -> None:
        by = "decode" if by_decode else "prefill"
        args = {"request": _name(request_id), "by": by, "reason": reason, "tokens": tokens}
        self._file.put(Traced(f"{by} computes", "i", "placed", args, row="prompts"))

    def ticket_issued(self, request_id: str, ticket: Ticket, trace_headers: Mapping[str, str] | None) -> None:
        self._put("b", ticket, "")

    def transfer_ended(self, request_id: str, ending: ReceiveEnding) -> None:
        self._put("e", ending.ticket, "" if ending.cause is None else ending.cause.value)

    def _put(self, ph: Literal["b", "e"], ticket: Ticket, failure: str) -> None:
        args = {**_transfer(ticket.request_id, ticket.ticket_id), "failure": failure}
        self._file.put(Traced(args["request"], ph, "request", args, id=args["transfer"]))
