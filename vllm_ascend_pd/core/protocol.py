# SPDX-License-Identifier: Apache-2.0
"""Every message between prefill and decode engines, and its encoding.

P is a prefill rank, D a decode engine:

    P -> D's listener, in its engine core    Describe      -> EngineDescription
    P -> a rank of D                         GrantRequest  -> Granted | GrantRefused
    P -> a rank of D                         WriteReport   -> Acknowledged
    a rank of D -> P, without a request      Revoke

Where P computes a prompt without a ticket, for an intent or for a router that asks prefill first, D sends the ticket
straight to the listener in P's engine core:

    D -> P's listener                        OfferTicket   -> TicketTaken | TicketRefused
    D -> P's listener                        AskTicket     -> TicketTaken | TicketRefused
    D -> P's listener                        ReleasePrompt -> Acknowledged | TicketRefused

Besides tickets, decode posts to the metaserver over HTTP, in JSON: `TransferFailure`, and `WaitingQuestion`, which is
answered by `WaitingAnswer`. Metaservers other than our proxy need not know them.

A frame is `[newest, seq, body, oldest]` in msgpack. A reply has the `seq` of its request. A message without a request
has 0. A peer answers `Problem` to a message that it cannot read.

`oldest` and `newest` are the protocol versions that the sender speaks. Any of them can read its messages. Both sides
act by the highest version that both speak, and refuse each other's messages if there is none.

Reading checks every field. Names that are too long or unprintable are refused. Reasons are cut to one printable line,
because they get into logs and into clients' errors.
"""

import enum
from typing import Annotated

import msgspec

from vllm_ascend_pd.core.bounds import MAX_RANKS, MAX_STAGES, MAX_TENSORS, MAX_TP
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.prompt_digest import PromptDigest
from vllm_ascend_pd.core.text import NAME, is_name, one_line
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.ticket_params import MAX_TRANSFER_ID_CHARS
from vllm_ascend_pd.core.topology import Sharding, sharding

PROTOCOL_VERSION = 2
"""The newest version that this side speaks.

Raise it if a peer of the version before would misread a message: a required field comes or goes, or a field's meaning
changes. Do not raise it for an optional field, which older peers ignore. Nor for a new request that may be answered
with `Problem`, as long as the sender gets along without an answer.

Version 2: a ticket has one prefill engine. Messages carry no attempt number. `Complete` and the messages
about clocks are gone.
"""

OLDEST_PROTOCOL_VERSION = 2
"""The oldest version that this side speaks. Peers that only speak older ones are refused.

Leave this as it is for at least one release after `PROTOCOL_VERSION` is raised: then engines can be updated one by one.
Until this is raised, too, messages have the fields of both versions. `tests/unit/data/wire` must be readable.
"""

METASERVER_PATH = "/v1/metaserver"
"""Where decode posts tickets over HTTP, as with vllm-ascend's layerwise proxy."""

MAX_DESCRIPTION_BYTES = 8 << 20
"""The longest description that is read. A tensor takes about 100 bytes, so this is some 80,000 tensors."""
MAX_MESSAGE_BYTES = 64 << 10
"""The longest other message that is read. Real ones take under a kilobyte, and 5 bytes per tensor."""
MAX_TICKET_BYTES = 1 << 20
"""The longest message that a listener for tickets reads. A block id takes 5 bytes, so this is some 200,000 blocks."""
MAX_CHECKSUM_BYTES = 48 << 10
"""The longest checksums of a report: those of 4096 tensors and 1024 columns fit (`core/checksum.py`)."""
MAX_REASON_CHARS = 1000
"""The length that reasons are cut to."""
MAX_SETTINGS = 512
"""The number of settings in an engine's description. Their names and values are as short as other names."""

# How much of an error of msgspec, which may quote the peer's message, is passed on.
_MAX_COMPLAINT_CHARS = 100

# Tensor-parallel and pipeline-parallel size.
_Tp = Annotated[int, msgspec.Meta(gt=0, le=MAX_TP)]
_Pp = Annotated[int, msgspec.Meta(gt=0, le=MAX_STAGES)]
_Name = Annotated[str, NAME]
_Id = Annotated[str, msgspec.Meta(max_length=64)]
_Stage = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TP)]
# Bytes of one writer to one rank. The sum over 1024 ranks of prefill and of decode is below 2^63, which vLLM encodes.
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 41)]
_Covers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_TENSORS)], ...], msgspec.Meta(max_length=MAX_TENSORS)
]
_TransferId = Annotated[str, msgspec.Meta(max_length=MAX_TRANSFER_ID_CHARS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class ProtocolError(ValueError):
    """A frame that is malformed, or of another protocol version."""


class WriterId(msgspec.Struct, frozen=True, array_like=True):
    """Names one transfer of one prefill rank to the decode ranks that it writes to."""

    # The prefill engine.
    engine_id: _Name
    # The writer's pipeline stage.
    pp_rank: _Stage
    # The writer's place in that stage, as `Sharding` counts.
    rank: _Rank
    # A random number that tells transfers of one ticket and rank apart. Only the ranks that it is sent to know it.
    transfer: int = 0

    def __post_init__(self) -> None:
        _check_name(self.engine_id)


class EngineKind(enum.StrEnum):
    """HIXL's engines. The values travel between prefill and decode."""

    CLIENT_SERVER = "client/server"
    COMM = "comm"
    FABRIC_MEMORY = "fabric memory"
    UNKNOWN = ""


class Connects(enum.StrEnum):
    """When an engine connects to a peer. The values travel between prefill and decode."""

    AUTO = "AutoConnect"
    BEFORE = "Connect"
    UNKNOWN = ""


class TransportInfo(msgspec.Struct, frozen=True):
    """How one rank's engine moves bytes. A field is empty if the rank does not state it.

    The fields are plain text, so that a later version may send values that this one does not know.
    """

    # `transfer_protocol`: tcp, rdma or ascend.
    protocol: _Name = ""
    # Mooncake's distribution and its version.
    wheel: _Name = ""
    # With `ascend`, an `EngineKind`.
    kind: _Name = ""
    # With `ascend`, a `Connects`.
    connects: _Name = ""

    def __str__(self) -> str:
        kind = f" with HIXL's {self.kind} engine" if self.kind else ""
        details = ", ".join(filter(None, (self.wheel, self.connects)))
        return f"{self.protocol or 'an unknown protocol'}{kind}" + (f" ({details})" if details else "")


class RankDescription(msgspec.Struct, frozen=True):
    """One decode rank."""

    pp_rank: _Stage
    tp_rank: _Rank
    # Where it takes grant requests and reports: `tcp://host:port`.
    control: _Name
    # Its transfer engine: `host:port`.
    session: _Name
    # Its cache tensors, and where they are in memory.
    caches: RankCaches
    # How its transfer engine moves bytes.
    transport: TransportInfo = TransportInfo()


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Asks for the description of the engine that issued a ticket."""

    engine_id: _Name


class EngineDescription(msgspec.Struct, frozen=True, tag=True):
    """All ranks of a decode engine."""

    engine_id: _Name
    # A readable summary of the model's shape. It must be equal on both sides.
    model: _Name
    # Tensor-parallel size.
    tp: _Tp
    # Pipeline-parallel size.
    pp: _Pp
    ranks: Annotated[tuple[RankDescription, ...], msgspec.Meta(max_length=MAX_RANKS)]
    # Decode context parallelism: the number of neighbouring tensor-parallel ranks that share a request's tokens.
    dcp: _Tp = 1
    # How many neighbouring tokens each of those ranks gets at a time.
    interleave: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)] = 1
    # Other settings that change the meaning of KV, by name. Empty if the engine does not state them.
    settings: Annotated[dict[_Name, _Name], msgspec.Meta(max_length=MAX_SETTINGS)] = {}

    @property
    def sharding(self) -> Sharding:
        return sharding(self.tp, self.dcp, self.interleave)

    @property
    def draft(self) -> str:
        """The draft model of speculative decoding that has caches of its own; "" if there is none."""
        return max((rank.caches.draft for rank in self.ranks), default="")


class GrantRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for permission to write for a ticket. Repeated while the transfer lasts, to renew the lease."""

    ticket_id: _Id
    # Digest of the ticket as the writer has it.
    digest: _Id
    writer: WriterId
    # The prefill engine's.
    sharding: Sharding
    # Indices of the decode rank's tensors that this writer will fill.
    covers: _Covers
    # How long bytes of an abandoned write may still arrive, in seconds.
    settle_s: _Seconds
    # The prefill engine's draft model (`Geometry.draft`).
    draft: _Name = ""
    # Fingerprint of the weights that prefill computes with. "" if it is not known.
    weights: _Id = ""

    def __post_init__(self) -> None:
        _check_name(self.draft)
        _check_name(self.weights)


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The writer may write."""

    # For so many seconds after it sent its request.
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]


class GrantRefused(msgspec.Struct, frozen=True, tag="Refused"):
    """The writer must not write."""

    reason: str
    # Whether to ask again: the ticket is not known yet, or its blocks are still in use by earlier steps.
    retry: bool

    def __post_init__(self) -> None:
        _shorten_reason(self)


class WriteReport(msgspec.Struct, frozen=True, tag="Report"):
    """The writer has stopped writing for this ticket, for good."""

    ticket_id: _Id
    writer: WriterId
    # Why not everything that the writer covers is written. None if everything is.
    reason: str | None
    # Bytes that it wrote to the decode rank.
    num_bytes: _Bytes = 0
    # Those of them that arrived before prefill's last layer ended.
    bytes_before_end: _Bytes = 0
    # After a failure: bytes may still arrive for so many seconds. Then the writer reports once more, with 0.
    settle_s: _Seconds = 0.0
    # Digest of the ticket, as in `GrantRequest`.
    digest: _Id = ""
    # How many of the prompt's tokens the prefill engine had in its prefix cache. None if the writer does not know.
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    # Checksums of what the writer's engine computed (`core/checksum.py`). None: it does not verify this ticket's KV.
    # Empty: it does, and could not take them.
    checksums: Annotated[bytes, msgspec.Meta(max_length=MAX_CHECKSUM_BYTES)] | None = None

    def __post_init__(self) -> None:
        _shorten_reason(self)


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """Answers a `WriteReport` or a `ReleasePrompt`."""


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """Tells a writer to stop writing for this ticket, and to report. Repeated until it reports or its process ends."""

    ticket_id: _Id
    writer: WriterId
    reason: str
    # Digest of the ticket, for a writer that has forgotten it.
    digest: _Id = ""

    def __post_init__(self) -> None:
        _shorten_reason(self)


class _AboutPrompt(msgspec.Struct, frozen=True):
    """A message about a prompt that prefill computes without a ticket."""

    # The prefill engine that the router's parameters name, in this start of it.
    engine_id: _Name
    # Names the prompt: `TRANSFER_ID` of both requests. Several prompts may share it.
    transfer_id: _TransferId

    def __post_init__(self) -> None:
        _check_name(self.engine_id)
        _check_name(self.transfer_id)


class OfferTicket(_AboutPrompt, frozen=True, tag=True):
    """Decode's ticket for the prompt. Sending it again changes nothing."""

    ticket: Ticket


class AskTicket(_AboutPrompt, frozen=True, tag=True):
    """Asks what has become of a ticket that was offered, or tells prefill that one is to come: the prompt is held."""

    ticket_id: _Id


class TicketTaken(msgspec.Struct, frozen=True, tag=True):
    """Prefill has the ticket: its ranks serve it, or it waits for its prompt or for prefill's next step."""


class TicketRefused(msgspec.Struct, frozen=True, tag=True):
    """Prefill does not have the ticket, or does not serve it."""

    reason: str
    # Whether to offer it again: prefill has no room for it now, or does not know it (any more).
    retry: bool

    def __post_init__(self) -> None:
        _shorten_reason(self)


class ReleasePrompt(_AboutPrompt, frozen=True, tag=True):
    """No ticket will come for a prompt: prefill frees its blocks at once. Without effect on a ticket that is served."""

    reason: str
    # Which of the prompts: these three as in its ticket, or as they would be. If none was issued, the id is new.
    ticket_id: _TransferId
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    prompt: PromptDigest | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_name(self.ticket_id)
        _shorten_reason(self)


class Problem(msgspec.Struct, frozen=True, tag=True):
    """Answers a message that could not be read or served."""

    reason: str

    def __post_init__(self) -> None:
        _shorten_reason(self)


Message = (
    Describe
    | EngineDescription
    | GrantRequest
    | Granted
    | GrantRefused
    | WriteReport
    | Acknowledged
    | Revoke
    | OfferTicket
    | AskTicket
    | TicketTaken
    | TicketRefused
    | ReleasePrompt
    | Problem
)


def _check_name(name: str) -> None:
    if not is_name(name):
        raise ValueError("a name that is too long or has unprintable characters")


def _shorten_reason(message: GrantRefused | WriteReport | Revoke | TicketRefused | ReleasePrompt | Problem) -> None:
    if message.reason is not None:
        msgspec.structs.force_setattr(message, "reason", one_line(message.reason, MAX_REASON_CHARS))


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    newest: int
    seq: int
    body: msgspec.Raw
    # None in version 1: the sender speaks only `newest`.
    oldest: int | None = None


_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(_Frame)
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(seq: int, message: Message) -> bytes:
    body = msgspec.Raw(_encoder.encode(message))
    return _encoder.encode(_Frame(PROTOCOL_VERSION, seq, body, OLDEST_PROTOCOL_VERSION))


def common_version(oldest: int, newest: int) -> int:
    """Returns the highest version that this side and a peer speak. `oldest`, `newest`: the peer's.

    Raises ProtocolError, which names the versions of both sides, if there is none.
    """
    highest = min(newest, PROTOCOL_VERSION)
    if highest < max(oldest, OLDEST_PROTOCOL_VERSION):
        theirs, ours = _versions(oldest, newest), _versions(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)
        raise ProtocolError(f"protocol version {theirs}, this side speaks {ours}")
    return highest


def _versions(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def decode(frame: bytes) -> tuple[int, Message]:
    """Returns (seq, message). Raises ProtocolError, and nothing else, whatever `frame` contains."""
    try:
        header = _frame_decoder.decode(frame)
        common_version(header.newest if header.oldest is None else header.oldest, header.newest)
        return header.seq, _body_decoder.decode(header.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # msgspec may quote what it could not read.
        raise ProtocolError(one_line(f"malformed message: {error}", _MAX_COMPLAINT_CHARS)) from None


# Messages from decode to the metaserver besides tickets.

FAILURE_SUFFIX = "/failure"
"""Appended to the URL for tickets: takes a `TransferFailure`."""

WAITING_SUFFIX = "/waiting"
"""Appended to the URL for tickets: takes a `WaitingQuestion`."""

MAX_ASKED = 1024
"""Most tickets in one `WaitingQuestion`."""

RECOMPUTES_HEADER = "X-KV-Recomputes"
"""Header of a ticket. `1`: decode computes a prompt itself if its KV does not arrive (`kv_load_failure_policy`)."""

MAX_FAILURE_CHARS = 500


class TransferFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A ticket's transfer failed, or a request gets no ticket and ends."""

    request_id: str
    # "": the request gets no ticket, or no further one.
    ticket_id: str
    # Why it failed, of `MAX_FAILURE_CHARS` at most.
    reason: str
    # Whether other decode engines would refuse the request, too.
    is_unfit: bool = False
    # Whether prefill reported it, or had delivered all KV: then the prefill engine is alive.
    by_prefill: bool = False


TicketIds = Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=MAX_ASKED)]


class WaitingQuestion(msgspec.Struct, frozen=True):
    """Asks which of these tickets still wait for a prefill engine, or are served by a healthy one."""

    ticket_ids: TicketIds


class WaitingAnswer(msgspec.Struct, frozen=True):
    """Answers a `WaitingQuestion` with those tickets."""

    waiting: TicketIds
