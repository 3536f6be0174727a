# SPDX-License-Identifier: Apache-2.0
"""The contents of trace files: Chrome trace events, one per line of a JSON array that is not closed.

The first line is `[`, every other line is `{...},`. chrome://tracing and Perfetto open such files. A process that is
killed loses at most its last line. The category (`cat`) determines the type of `args`. Times are microseconds of the
host's monotonic clock, and `vllm-ascend-pd timeline` aligns the clocks. Traces name requests, but have no contents and
no secrets: tickets appear as fingerprints.
"""

import hashlib
from typing import Annotated, Literal

import msgspec

from vllm_ascend_pd.core.text import one_line

FORMAT = 1
FILE_PATTERN = "events-*.json"

_MAX_NAME = 300

# Bounds far above what engines write, because trace files are untrusted input.
_Micros = Annotated[float, msgspec.Meta(ge=-1e17, le=1e17)]
_Name = Annotated[str, msgspec.Meta(max_length=4 * _MAX_NAME)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
_Transfer = Annotated[str, msgspec.Meta(max_length=64)]
_Few = msgspec.Meta(max_length=4096)


def fingerprint(ticket_id: str) -> str:
    """Names a transfer in traces, equally on both sides. It does not reveal the ticket's id, which is a secret."""
    return hashlib.blake2b(ticket_id.encode(), digest_size=8, person=b"pd-trace").hexdigest()


def short_name(name: str) -> str:
    """Shortens a name for traces."""
    return one_line(name, _MAX_NAME)


class TracedProcess(msgspec.Struct, frozen=True):
    """The process that wrote a file."""

    format: int
    part: Literal["prefill rank", "decode rank", "decode scheduler"]
    engine: _Name
    pp_rank: _Id
    rank: _Id
    clock: _Transfer  # names the host's monotonic clock
    unix_offset_us: _Micros  # unix time minus this clock's time


class ClockOffset(msgspec.Struct, frozen=True):
    """A peer's clock: its time is this host's time plus `offset_us`, with an error of at most `uncertainty_us`."""

    clock: _Transfer
    offset_us: _Micros
    uncertainty_us: Annotated[float, msgspec.Meta(ge=0, le=1e17)]


class Lane(msgspec.Struct, frozen=True):
    """The name of a process or of one of its rows, in Chrome's format."""

    name: _Name


class Part(msgspec.Struct, frozen=True):
    """Tokens `[start, stop)` of a request's prompt."""

    request: _Name
    transfer: _Transfer
    start: _Id
    stop: _Id


class Step(msgspec.Struct, frozen=True):
    """A forward pass, and the tokens whose KV it completes."""

    step: _Id
    parts: Annotated[tuple[Part, ...], _Few]


class Layer(msgspec.Struct, frozen=True):
    """Span from the end of the previous layer until the KV of this layer was computed."""

    step: _Id
    layer: _Name


class Regrouping(msgspec.Struct, frozen=True):
    """Span from when a layer's regrouping could begin until its KV was in the staging buffer."""

    layer: _Name
    transfers: Annotated[tuple[_Transfer, ...], _Few]


class Push(msgspec.Struct, frozen=True):
    """Span of a write of a layer's KV to a decode rank. `bytes` lists the transfers that did not fail."""

    layer: _Name
    to: _Name
    bytes: Annotated[dict[_Transfer, _Bytes], _Few]


class Grant(msgspec.Struct, frozen=True):
    """Span from a request for a grant, or for its renewal, until the decode rank's answer."""

    request: _Name
    transfer: _Transfer
    to: _Name
    answer: _Name


class Finished(msgspec.Struct, frozen=True):
    """A prefill rank has stopped writing. `failure` is the kind of failure, "" if all was written."""

    request: _Name
    transfer: _Transfer
    attempt: _Id
    bytes: _Bytes
    bytes_before_end: _Bytes
    failure: _Name


class Mark(msgspec.Struct, frozen=True):
    """Something that happened to a request; the event's name says what. `transfer` is "" if it has none."""

    request: _Name
    transfer: _Transfer
    about: _Name = ""


class Lost(msgspec.Struct, frozen=True):
    """Events that are missing in the file."""

    events: _Id
    why: _Name


class _Event(msgspec.Struct, kw_only=True, tag_field="cat"):
    """`ph`: X for a span, i for an instant, M for metadata."""

    name: _Name
    ph: Literal["X", "i", "M"] = "X"
    ts: _Micros = 0.0
    dur: Annotated[float, msgspec.Meta(ge=0, le=1e17)] = 0.0
    pid: _Id = 0
    tid: _Id = 0

    @property
    def end(self) -> float:
        return self.ts + self.dur


class ProcessEvent(_Event, tag="process"):
    args: TracedProcess


class OffsetEvent(_Event, tag="clock"):
    args: ClockOffset


class LaneEvent(_Event, tag="lane"):
    args: Lane


class StepEvent(_Event, tag="step"):
    args: Step


class LayerEvent(_Event, tag="compute"):
    args: Layer


class RegroupEvent(_Event, tag="regroup"):
    args: Regrouping


class PushEvent(_Event, tag="push"):
    args: Push


class GrantEvent(_Event, tag="grant"):
    args: Grant


class FinishedEvent(_Event, tag="finished"):
    args: Finished


class MarkEvent(_Event, tag="request"):
    args: Mark


class LostEvent(_Event, tag="lost"):
    args: Lost


TraceEvent = (
    ProcessEvent
    | OffsetEvent
    | LaneEvent
    | StepEvent
    | LayerEvent
    | RegroupEvent
    | PushEvent
    | GrantEvent
    | FinishedEvent
    | MarkEvent
    | LostEvent
)

# Names of marks: what happens to a request on decode. PLACED: it was decided who computes its prompt; `about` says who
# and why, and there is no transfer yet. TOLD is prefill's: decode has been told how the transfer ended.
PLACED = "prompt placed"
ISSUED = "ticket issued"
EXPECTED = "ticket received"
GRANTED = "grant sent"
REPORTED = "report received"
RECEIVED = "all written"
FAILED = "failed"
READY = "ready"
TOLD = "told"
