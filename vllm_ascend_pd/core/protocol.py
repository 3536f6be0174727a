# SPDX-License-Identifier: Apache-2.0
"""Every message between prefill and decode engines, and its encoding.

The conversations (P: prefill rank, D: decode side):

    P -> D's listener (engine core)   Describe      -> EngineDescription
    P -> D's rank                     GrantRequest  -> Granted | GrantRefused | Complete
    P -> D's rank                     WriteReport   -> Acknowledged
    P -> D's rank                     ReadClock     -> ClockReading
    D's rank -> P, unasked            Revoke

A frame is `[version, seq, body]` in msgpack; a reply carries the `seq` of its request, an unasked message 0.
Anything that cannot be read is answered with `Problem`. Names that cannot be are refused where a message is read,
and reasons cut to one printable line: they end up in logs and in clients' errors.
"""

from typing import Annotated

import msgspec

from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.text import is_name, one_line
from vllm_ascend_pd.core.topology import Sharding, sharding
from vllm_ascend_pd.core.transports import TransportInfo

PROTOCOL_VERSION = 1

METASERVER_PATH = "/v1/metaserver"
"""Where decode posts tickets over HTTP, as with vllm-ascend's layerwise proxy."""

# Bounds of what a listener accepts, far above what real engines send: a description holds about 100 bytes per
# tensor (8 MiB is some 80,000 tensors), any other message less than a kilobyte plus 5 bytes per tensor.
MAX_DESCRIPTION_BYTES = 8 << 20
MAX_MESSAGE_BYTES = 64 << 10
_Ranks = Annotated[int, msgspec.Meta(gt=0, le=1024)]
"""A parallel size: more than any engine has, and no more than can be computed with."""


MAX_REASON_CHARS = 1000
MAX_SETTINGS = 512
"""Of an engine's description. Names and values are as short as other names."""
_MAX_COMPLAINT_CHARS = 100

_Id = Annotated[str, msgspec.Meta(max_length=64)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
# Of one writer to one rank. A request's sum over 1024 ranks of prefill and of decode is below 2^63, which vLLM encodes.
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 41)]
_Covers = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(max_length=1 << 17)]


class ProtocolError(ValueError):
    """A frame that is malformed, too new or too old."""


class WriterId(msgspec.Struct, frozen=True, array_like=True):
    """A prefill rank's transfer, as decode ranks know it: `rank` of pipeline stage `pp_rank`, as `Sharding` counts.
    `transfer` tells it from others of the same ticket and rank; nobody else knows it."""

    engine_id: str
    pp_rank: _Rank
    rank: _Rank
    transfer: int = 0

    def __post_init__(self) -> None:
        _check_name(self.engine_id)


class RankDescription(msgspec.Struct, frozen=True):
    """One decode rank. `control`: where it takes grant requests and reports (`tcp://host:port`);
    `session`: its transfer engine (`host:port`); `transport`: how that engine moves bytes."""

    pp_rank: int
    tp_rank: int
    control: str
    session: str
    caches: RankCaches
    transport: TransportInfo = TransportInfo()


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Asks for the description of the engine that issued a ticket."""

    engine_id: str


class EngineDescription(msgspec.Struct, frozen=True, tag=True):
    """All ranks of a decode engine. `model`: a readable summary of the model's shape, equal on both sides; `dcp`:
    among how many neighbouring tensor-parallel ranks tokens are dealt out, `interleave` at a time; `settings`: what
    else changes the meaning of KV, by name, none if the engine does not say."""

    engine_id: str
    model: str
    tp: _Ranks
    pp: _Ranks
    ranks: tuple[RankDescription, ...]
    dcp: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)] = 1
    interleave: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)] = 1
    settings: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_SETTINGS)] = {}

    @property
    def sharding(self) -> Sharding:
        return sharding(self.tp, self.dcp, self.interleave)

    @property
    def draft(self) -> str:
        """What drafts with caches of its own, for speculative decoding; "" if nothing does."""
        return max((rank.caches.draft for rank in self.ranks), default="")


class GrantRequest(msgspec.Struct, frozen=True, tag=True):
    """May I write for this ticket? Repeated while the transfer lasts, to renew the lease.

    `digest` is the ticket's content as the writer has it, `sharding` the prefill engine's, `covers` the indices of
    the decode rank's tensors that this writer will fill, `settle_s` how long bytes of a write that was given up
    may go on arriving, `draft` what drafts on the prefill engine (`Geometry.draft`). `weights`: the fingerprint of the
    weights that it computes with, "" if it does not know.
    """

    ticket_id: _Id
    attempt: int
    digest: _Id
    writer: WriterId
    sharding: Sharding
    covers: _Covers
    settle_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    draft: str = ""
    weights: _Id = ""

    def __post_init__(self) -> None:
        _check_name(self.draft)
        _check_name(self.weights)


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The writer may write for `lease_s` seconds, counted from when it sent its request."""

    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]


class GrantRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """No. With `retry` not yet: the ticket is not known, or another attempt may still write; asking on
    for the latter is worth it for `wait_s` at least."""

    reason: str
    retry: bool
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0

    def __post_init__(self) -> None:
        _shorten_reason(self)


class Complete(msgspec.Struct, frozen=True, tag=True):
    """The decode rank has received everything for this ticket, from another attempt: there is nothing to write."""


class WriteReport(msgspec.Struct, frozen=True, tag="Report"):
    """The writer has stopped writing for this ticket, for good: everything it covers is written (`reason` is
    None), or not. It wrote `num_bytes` to whom it tells, `bytes_before_end` of them before prefill's last layer
    ended. After a failure, bytes already on their way may arrive for `settle_s` seconds more; then it reports once
    more, with 0. `digest` shows, as in a `GrantRequest`, that the writer has the ticket. `cached_tokens`: how many of
    the prompt's tokens the prefill engine had in its prefix cache; None where the writer does not know."""

    ticket_id: _Id
    attempt: int
    writer: WriterId
    reason: str | None
    num_bytes: _Bytes = 0
    bytes_before_end: _Bytes = 0
    settle_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    digest: _Id = ""
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None

    def __post_init__(self) -> None:
        _shorten_reason(self)


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """The report was taken note of."""


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """`writer` is to stop writing for this ticket and report. Repeated until it has, or its process has ended.
    `digest`: the ticket's, for a writer that has forgotten it."""

    ticket_id: _Id
    attempt: int
    writer: WriterId
    reason: str
    digest: _Id = ""

    def __post_init__(self) -> None:
        _shorten_reason(self)


class ReadClock(msgspec.Struct, frozen=True, tag=True):
    """Asks a decode rank for its time, for traces. Only who has an open ticket gets it: `digest` is the ticket's."""

    ticket_id: _Id
    digest: _Id


class ClockReading(msgspec.Struct, frozen=True, tag=True):
    """When a decode rank received the question and when it answered, in seconds of its monotonic clock."""

    clock: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]  # the clock's name (core/host_clock.py)
    received_s: Annotated[float, msgspec.Meta(ge=0, le=1e10)]
    sent_s: Annotated[float, msgspec.Meta(ge=0, le=1e10)]


class Problem(msgspec.Struct, frozen=True, tag=True):
    """The message could not be read or served."""

    reason: str

    def __post_init__(self) -> None:
        _shorten_reason(self)


Message = (
    Describe
    | EngineDescription
    | GrantRequest
    | Granted
    | GrantRefused
    | Complete
    | WriteReport
    | Acknowledged
    | Revoke
    | ReadClock
    | ClockReading
    | Problem
)


def _check_name(name: str) -> None:
    if not is_name(name):
        raise ValueError("a name that is too long or has unprintable characters")


def _shorten_reason(message: GrantRefused | WriteReport | Revoke | Problem) -> None:
    if message.reason is not None:
        msgspec.structs.force_setattr(message, "reason", one_line(message.reason, MAX_REASON_CHARS))


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    version: int
    seq: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(_Frame)
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(seq: int, message: Message) -> bytes:
    return _encoder.encode(_Frame(PROTOCOL_VERSION, seq, msgspec.Raw(_encoder.encode(message))))


def decode(frame: bytes) -> tuple[int, Message]:
    """Returns (seq, message). Raises ProtocolError, never anything else, whatever the bytes."""
    try:
        header = _frame_decoder.decode(frame)
        if header.version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {header.version}, this side speaks {PROTOCOL_VERSION}")
        return header.seq, _body_decoder.decode(header.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # msgspec may quote what it could not read.
        raise ProtocolError(one_line(f"malformed message: {error}", _MAX_COMPLAINT_CHARS)) from None
