# SPDX-License-Identifier: Apache-2.0
"""What trace files hold: Chrome trace events, one per line of a JSON array that nobody needs to close.

A line is `{...},` after a first line `[`: chrome://tracing and Perfetto open such a file, and a process that is killed
leaves all of it but its last line. The category (`cat`) says what `args` hold. Times are microseconds of the host's
monotonic clock; `timeline` brings them onto one clock. Requests are named, their contents and secrets are not: of a
ticket's id there is only a fingerprint, which tells transfers apart and opens nothing.
"""

import hashlib
from typing import Annotated, Literal

import msgspec

from vllm_ascend_pd.core.text import one_line

FORMAT = 1
FILE_PATTERN = "events-*.json"

_MAX_NAME = 300

# Far above what engines write: what is read back may come from anywhere.
_Micros = Annotated[float, msgspec.Meta(ge=-1e17, le=1e17)]
_Name = Annotated[str, msgspec.Meta(max_length=4 * _MAX_NAME)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
_Transfer = Annotated[str, msgspec.Meta(max_length=64)]
_Few = msgspec.Meta(max_length=4096)


def fingerprint(ticket_id: str) -> str:
    """Names a transfer in traces: the same on prefill and decode, and of no use to who reads them."""
    return hashlib.blake2b(ticket_id.encode(), digest_size=8, person=b"pd-trace").hexdigest()


def short_name(name: str) -> str:
    """A name as traces hold it."""
    return one_line(name, _MAX_NAME)


class TracedProcess(msgspec.Struct, frozen=True):
    """Who wrote a file. `clock` names the host's monotonic clock; `unix_offset_us` added to its time is unix time."""

    format: int
    part: Literal["prefill rank", "decode rank", "decode scheduler"]
    engine: _Name
    pp_rank: _Id
    rank: _Id
    clock: _Transfer
    unix_offset_us: _Micros


class ClockOffset(msgspec.Struct, frozen=True):
    """A clock of a peer: its time is ours plus `offset_us`, give or take `uncertainty_us`."""

    clock: _Transfer
    offset_us: _Micros
    uncertainty_us: Annotated[float, msgspec.Meta(ge=0, le=1e17)]


class Lane(msgspec.Struct, frozen=True):
    """The name of a process or of a row in it, as Chrome wants it."""

    name: _Name


class Part(msgspec.Struct, frozen=True):
    """Tokens `[start, stop)` of a request's prompt."""

    request: _Name
    transfer: _Transfer
    start: _Id
    stop: _Id


class Step(msgspec.Struct, frozen=True):
    """A forward pass, and whose KV it completes."""

    step: _Id
    parts: Annotated[tuple[Part, ...], _Few]


class Layer(msgspec.Struct, frozen=True):
    """From the end of the layer before until the KV of this one was computed."""

    step: _Id
    layer: _Name


class Regrouping(msgspec.Struct, frozen=True):
    """From when the side stream could begin to regroup a layer's KV until that was in the staging buffer."""

    layer: _Name
    transfers: Annotated[tuple[_Transfer, ...], _Few]


class Push(msgspec.Struct, frozen=True):
    """The write of a layer's KV to a decode rank. `bytes`: by transfer, of those that did not fail."""

    layer: _Name
    to: _Name
    bytes: Annotated[dict[_Transfer, _Bytes], _Few]


class Grant(msgspec.Struct, frozen=True):
    """From asking a decode rank for a grant, or its renewal, until its answer."""

    request: _Name
    transfer: _Transfer
    to: _Name
    answer: _Name


class Finished(msgspec.Struct, frozen=True):
    """A prefill rank has stopped writing. `failure`: the kind, "" if all is written."""

    request: _Name
    transfer: _Transfer
    attempt: _Id
    bytes: _Bytes
    bytes_before_end: _Bytes
    failure: _Name


class Mark(msgspec.Struct, frozen=True):
    """Something that happened to a request; the event's name says what."""

    request: _Name
    transfer: _Transfer
    about: _Name = ""


class Lost(msgspec.Struct, frozen=True):
    """Events that were not written."""

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

# What happens to a request on decode, and that prefill has told it how a transfer ended.
ISSUED = "ticket issued"
EXPECTED = "ticket received"
GRANTED = "grant sent"
REPORTED = "report received"
RECEIVED = "all written"
FAILED = "failed"
READY = "ready"
TOLD = "told"
