# SPDX-License-Identifier: Apache-2.0
"""A ticket: decode's promise that a prefill engine may fill these blocks of this request, once.

The decode side's state machine, one per decode rank and ticket:

    OPEN --every writer wrote everything--> RECEIVED
      |---a writer failed, cancelled, deadline, lease ran out--> FAILED
    RECEIVED and FAILED are final; blocks may be released when no writer can still write (`quiet`).

A writer holds a lease from its grant until it reports. `quiet` is rule R2: every granted writer has reported
or its lease has passed, and with it the time that bytes already on their way may take to arrive.
"""

import enum
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeGuard

import msgspec

from vllm_ascend_pd.core.protocol import Granted, GrantRequest, Refused, Report, Writer
from vllm_ascend_pd.core.topology import Sharding, sharding

# What a rank remembers of tickets it has closed, so that late requests are refused, not asked to retry.
MAX_TOMBSTONES = 16384

# Numbers of blocks and tokens from outside: whatever passes fits offset arithmetic and messages.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


# More ranks than any engine has: bounds what a ticket or a grant request can make us compute.
MAX_TP = 1024


class TicketError(ValueError):
    """A ticket that is malformed or does not fit the request it came with."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The ticket as it travels in `kv_transfer_params`, from decode over the metaserver to prefill.

    The names that vllm-ascend's layerwise connector uses keep their meaning; the last block are our own.
    Block ids are per cache group and cover the whole prompt; prefill writes tokens
    `[remote_cached_tokens, num_tokens)` only. With decode context parallelism a block id stands for a block of
    `remote_block_size` tokens on each of `remote_dcp_size` ranks, `remote_interleave_size` tokens in turn. Of draft
    layers those of `remote_draft` are written (`Geometry.draft`).
    """

    request_id: str
    do_remote_prefill: bool = False
    do_remote_decode: bool = True
    token_ids: list[int] = []
    remote_block_ids: list[list[_Count]]
    remote_block_size: list[_Count]
    remote_engine_id: str
    remote_host: str
    remote_port: int
    remote_tp_size: int
    remote_pcp_size: int = 1
    remote_dcp_size: _Count = 1
    remote_cached_tokens: _Count

    ticket_id: str
    attempt: _Count = 0
    num_tokens: _Count
    remote_interleave_size: _Count = 1
    remote_draft: str = ""

    @property
    def sharding(self) -> Sharding:
        """Decode's."""
        return sharding(self.remote_tp_size, self.remote_dcp_size, self.remote_interleave_size)

    def span(self, group: int) -> int:
        """How many of the prompt's tokens one of decode's block ids stands for."""
        return self.remote_block_size[group] * self.remote_dcp_size

    @property
    def salt(self) -> int:
        """A number that spreads tickets over replicas, the same on both sides."""
        return salt_of(self.ticket_id)

    @property
    def endpoint(self) -> str:
        """Decode's listener."""
        return f"tcp://{self.remote_host}:{self.remote_port}"

    def digest(self) -> str:
        """Fingerprint of all that decides where bytes go."""
        content = (
            self.ticket_id,
            self.attempt,
            self.remote_engine_id,
            self.remote_cached_tokens,
            self.num_tokens,
            self.remote_block_ids,
            self.remote_block_size,
            self.remote_draft,
        )
        return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16).hexdigest()


def salt_of(ticket_id: str) -> int:
    return int(ticket_id[:8], 16)


def wants_ticket(params: Mapping[str, Any] | None) -> bool:
    """Whether a request on decode asks for its prompt's KV to be pushed.

    Where several connectors serve one engine, all see all requests. One for a connector that pulls says which engine
    it pulls from; vLLM's and vllm-ascend's name it `remote_engine_id`.
    """
    return params is not None and bool(params.get("do_remote_prefill")) and params.get("remote_engine_id") is None


def carries_ticket(params: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether a request on prefill is to be pushed. One that another connector's decode will pull names no blocks."""
    if params is None or not params.get("do_remote_decode"):
        return False
    return any(params.get(name) is not None for name in ("ticket_id", "remote_block_ids"))


def parse_ticket(
    params: object, num_tokens: int, num_groups: int, state_groups: Collection[int] = frozenset()
) -> Ticket:
    """The ticket in a request's `kv_transfer_params`, checked. Raises TicketError naming what is wrong.

    `num_tokens`: the request's prompt length; `num_groups`: how many cache groups this engine has; `state_groups`:
    which of them hold states, so that their tickets name one block, of one token.
    """
    try:
        ticket = msgspec.convert(params, Ticket)
    except msgspec.ValidationError as error:
        raise TicketError(f"kv_transfer_params is not a ticket: {error}") from None
    if len(ticket.ticket_id) != 32 or not set(ticket.ticket_id) <= set("0123456789abcdef"):
        raise TicketError("ticket_id is not 32 hexadecimal digits")
    if not (ticket.remote_host.isprintable() and ticket.remote_engine_id.isprintable()):
        raise TicketError("remote_host or remote_engine_id has unprintable characters")
    if not (0 < ticket.remote_port < 65536 and ticket.remote_host and 0 < ticket.remote_tp_size <= MAX_TP):
        raise TicketError("remote_host, remote_port or remote_tp_size is out of range")
    if ticket.num_tokens != num_tokens:
        raise TicketError(f"the ticket is for {ticket.num_tokens} prompt tokens, the prompt has {num_tokens}")
    if not len(ticket.remote_block_ids) == len(ticket.remote_block_size) == num_groups:
        raise TicketError(f"the ticket has {len(ticket.remote_block_ids)} cache groups, this engine has {num_groups}")
    if not 0 <= ticket.remote_cached_tokens <= num_tokens:
        raise TicketError(f"remote_cached_tokens {ticket.remote_cached_tokens} is out of range")
    if ticket.remote_pcp_size != 1:
        raise TicketError(f"remote_pcp_size is {ticket.remote_pcp_size}: prefill context parallelism on decode")
    dcp, interleave = ticket.remote_dcp_size, ticket.remote_interleave_size
    if dcp < 1 or ticket.remote_tp_size % dcp:
        raise TicketError(f"remote_dcp_size {dcp} does not divide remote_tp_size {ticket.remote_tp_size}")
    if dcp > 1 and state_groups:
        raise TicketError(f"remote_dcp_size {dcp}: states are not shared by context parallelism")
    for group, (blocks, size) in enumerate(zip(ticket.remote_block_ids, ticket.remote_block_size, strict=True)):
        if group in state_groups:
            if size != 1 or len(blocks) != 1:
                raise TicketError(f"remote_block_ids: {len(blocks)} blocks of {size} for the state in group {group}")
            continue
        if size < 1 or ticket.remote_cached_tokens % (span := ticket.span(group)):
            raise TicketError(f"remote_block_size {size} does not fit remote_cached_tokens")
        if interleave < 1 or size % interleave:
            raise TicketError(f"remote_interleave_size {interleave} does not divide remote_block_size {size}")
        if len(blocks) * span < num_tokens or any(block < 0 for block in blocks):
            raise TicketError(f"remote_block_ids: {len(blocks)} blocks of {span} for {num_tokens} tokens")
    return ticket


class State(enum.Enum):
    OPEN = "open"
    RECEIVED = "received"
    FAILED = "failed"


@dataclass
class _Lease:
    covers: frozenset[int]
    until: float
    reported: bool = False
    settling: bool = False  # has reported a failure; `until` is when its last bytes have arrived


@dataclass
class ConsumerTicket:
    """What a decode rank knows of a ticket. Times are seconds of one monotonic clock, passed in.

    `lease_s`: how long a grant lasts; each writer says how long a write begun within it may outlast it.
    """

    ticket_id: str
    attempt: int
    digest: str
    deadline: float
    lease_s: float
    state: State = State.OPEN
    reason: str = ""
    num_bytes: int = 0
    bytes_before_end: int = 0
    settle_by: float | None = None
    _engine: tuple[str, Sharding] | None = None
    _leases: dict[Writer, _Lease] = field(default_factory=dict)
    _missing: set[tuple[int, int]] = field(default_factory=set)

    @property
    def engine_known(self) -> bool:
        return self._engine is not None

    def expect(self, engine_id: str, sharding: Sharding, expected: frozenset[tuple[int, int]]) -> None:
        """Fixes who must write what: pairs (index of our tensor, rank of the writer in its pipeline stage)."""
        assert self._engine is None
        self._engine = (engine_id, sharding)
        self._missing = set(expected)

    def grant(self, request: GrantRequest, now: float) -> Granted | Refused:
        """Decides a grant request, or a renewal. `expect` must have been called."""
        self.tick(now)
        if self.state is not State.OPEN:
            return Refused(f"the ticket is {self.state.value} {self.reason}".strip(), retry=False)
        if (request.attempt, request.digest) != (self.attempt, self.digest):
            return Refused("the ticket was altered or is of another attempt", retry=False)
        if self._engine != (request.writer.engine_id, request.sharding):
            return Refused("another prefill engine is writing for this ticket", retry=False)
        lease = self._leases.get(request.writer)
        if lease is not None and (lease.reported or lease.settling):
            return Refused("this writer has already reported", retry=False)
        covers = frozenset(request.covers)
        if lease is not None and lease.covers != covers:
            return Refused("a renewal must cover what the grant covered", retry=False)
        until = now + self.lease_s + request.settle_s
        if lease is None:
            claimed = {(t, w.rank) for w, other in self._leases.items() for t in other.covers}
            if not {(tensor, request.writer.rank) for tensor in covers} <= self._missing - claimed:
                return Refused("the writer covers tensors that are not its to write", retry=False)
            self._leases[request.writer] = _Lease(covers, until)
        else:
            lease.until = until
        return Granted(self.lease_s)

    def report(self, report: Report, now: float) -> bool:
        """A writer has stopped. Returns False for a report that is not to be believed.

        A writer that was never granted anything may say that it cannot serve the ticket, nothing else.
        """
        if report.attempt != self.attempt:
            return False
        lease = self._leases.get(report.writer)
        if lease is None:
            stranger = self._engine is not None and self._engine[0] != report.writer.engine_id
            if report.reason is None or stranger:
                return False
            self.fail(f"prefill rank {report.writer.rank}: {report.reason}")
            return True
        if lease.reported or lease.settling:
            return True
        if report.settle_s > 0:
            lease.until = now + report.settle_s
            lease.settling = True
        else:
            lease.reported = True
        if self.state is not State.OPEN:
            return True
        if report.reason is not None:
            self.fail(f"prefill rank {report.writer.rank}: {report.reason}")
            return True
        self.num_bytes += report.num_bytes
        self.bytes_before_end += report.bytes_before_end
        self._missing -= {(tensor, report.writer.rank) for tensor in lease.covers}
        if not self._missing:
            self.state = State.RECEIVED
        return True

    def fail(self, reason: str) -> None:
        """Final unless the ticket already ended."""
        if self.state is State.OPEN:
            self.state = State.FAILED
            self.reason = reason

    def prefill_has_ended(self, settle_by: float) -> None:
        """Whoever wants to write has asked for it by now, or will until `settle_by`; else nobody will."""
        self.settle_by = settle_by

    def tick(self, now: float) -> None:
        """Lets time pass: a writer whose lease ran out is lost, and so is a ticket past its deadline."""
        if self.state is not State.OPEN:
            return
        lost = [w for w, lease in self._leases.items() if not lease.reported and now >= lease.until]
        if lost:
            self.fail(f"prefill rank {lost[0].rank} of engine {lost[0].engine_id} went silent")
        elif now >= self.deadline:
            self.fail("nothing was received" if not self._leases else "the transfer took too long")
        elif self.settle_by is not None and now >= self.settle_by and not self.live_writers():
            self.fail("prefill ended without writing everything")

    def quiet(self, now: float) -> bool:
        """No writer can still write, nor be granted to."""
        return self.state is not State.OPEN and all(
            lease.reported or now >= lease.until for lease in self._leases.values()
        )

    def live_writers(self) -> list[Writer]:
        return [w for w, lease in self._leases.items() if not (lease.reported or lease.settling)]
