# SPDX-License-Identifier: Apache-2.0
"""A ticket: decode's promise that a prefill engine may fill these blocks of this request.

The decode side's state machine, one per decode rank and ticket:

    OPEN --every writer wrote everything--> RECEIVED
      |---a writer failed, its lease ran out, a higher attempt asks--> FENCING
    FENCING --no writer of the attempt can write any more, a higher one asks--> OPEN
    OPEN, FENCING --cancelled, deadline, prefill ended without writing everything--> FAILED
    RECEIVED and FAILED are final; blocks may be released when no writer can still write (`quiet`).

A writer holds a lease from its grant until it reports. Rule R2: a granted writer can write until it has reported that
it stopped and that nothing of it is on its way, or until its lease has passed, with it the time that bytes may take to
arrive, and its process has ended: one that is stopped for longer goes on where it was.
"""

import enum
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeGuard

import msgspec

from vllm_ascend_pd.core.hosts import is_host
from vllm_ascend_pd.core.protocol import Complete, Granted, GrantRequest, Refused, Report, Writer
from vllm_ascend_pd.core.text import is_name
from vllm_ascend_pd.core.topology import Sharding, sharding

# What a rank remembers of tickets it has closed, so that late requests are refused, not asked to retry.
MAX_TOMBSTONES = 16384

# Numbers of blocks and tokens from outside: whatever passes fits offset arithmetic and messages.
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


# More ranks than any engine has: bounds what a ticket or a grant request can make us compute.
MAX_TP = 1024
# More writers than any prefill engine has ranks: bounds what grant requests can make us remember.
MAX_WRITERS = 4096
MAX_ATTEMPTS = 16

# While a writer of the next attempt has asked within this time, it is waiting for its grant.
_WAITS_S = 5.0


class TicketError(ValueError):
    """A ticket that is malformed or does not fit the request it came with."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The ticket as it travels in `kv_transfer_params`, from decode over the metaserver to prefill.

    The names that vllm-ascend's layerwise connector uses keep their meaning; the last block are our own.
    Block ids are per cache group and cover the whole prompt; prefill writes tokens
    `[remote_cached_tokens, num_tokens)` only. With decode context parallelism a block id stands for a block of
    `remote_block_size` tokens on each of `remote_dcp_size` ranks, `remote_interleave_size` tokens in turn. Of draft
    layers those of `remote_draft` are written (`Geometry.draft`). `expires_at` (unix seconds) and `signature` are
    there when the cluster has a secret (`core/signing.py`).
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
    expires_at: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    signature: Annotated[str, msgspec.Meta(max_length=64)] = ""

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
        host = f"[{self.remote_host}]" if ":" in self.remote_host else self.remote_host
        return f"tcp://{host}:{self.remote_port}"

    @property
    def issuer(self) -> tuple[str, str]:
        """The decode engine: where it is asked, and its id."""
        return (self.endpoint, self.remote_engine_id)

    def digest(self) -> str:
        """Fingerprint of all that decides where bytes go, the same in all attempts."""
        content = (
            self.ticket_id,
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
    if not isinstance(params, Mapping):  # vLLM checks the type of `kv_transfer_params`, but not in `vllm_xargs`
        return False
    return bool(params.get("do_remote_prefill")) and params.get("remote_engine_id") is None


def carries_ticket(params: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether a request on prefill is to be pushed. One that another connector's decode will pull names no blocks."""
    if not isinstance(params, Mapping) or not params.get("do_remote_decode"):
        return False
    return any(params.get(name) is not None for name in ("ticket_id", "remote_block_ids"))


def parse_ticket(
    params: object, num_tokens: int, num_groups: int, state_groups: Collection[int] = frozenset()
) -> Ticket:
    """The ticket in a request's `kv_transfer_params`, checked. Raises TicketError naming what is wrong.

    `num_tokens`: the prompt's length; the ticket may be for one less. `num_groups`: how many cache groups this engine
    has; `state_groups`: which of them hold states, so that their tickets name one block, of one token.
    """
    try:
        ticket = msgspec.convert(params, Ticket)
    except msgspec.ValidationError as error:
        raise TicketError(f"kv_transfer_params is not a ticket: {error}") from None
    if len(ticket.ticket_id) != 32 or not set(ticket.ticket_id) <= set("0123456789abcdef"):
        raise TicketError("ticket_id is not 32 hexadecimal digits")
    if not all(map(is_name, (ticket.request_id, ticket.remote_engine_id, ticket.remote_draft))):
        raise TicketError("request_id, remote_engine_id or remote_draft is too long or has unprintable characters")
    if not is_host(ticket.remote_host):
        raise TicketError("remote_host is neither an address nor a host's name")
    if not (0 < ticket.remote_port < 65536 and 0 < ticket.remote_tp_size <= MAX_TP):
        raise TicketError("remote_port or remote_tp_size is out of range")
    if not max(1, num_tokens - 1) <= ticket.num_tokens <= num_tokens:
        raise TicketError(f"the ticket is for {ticket.num_tokens} prompt tokens, the prompt has {num_tokens}")
    if not len(ticket.remote_block_ids) == len(ticket.remote_block_size) == num_groups:
        raise TicketError(f"the ticket has {len(ticket.remote_block_ids)} cache groups, this engine has {num_groups}")
    if not 0 <= ticket.remote_cached_tokens <= ticket.num_tokens:
        raise TicketError(f"remote_cached_tokens {ticket.remote_cached_tokens} is out of range")
    if ticket.remote_pcp_size != 1:
        raise TicketError(f"remote_pcp_size is {ticket.remote_pcp_size}: prefill context parallelism on decode")
    dcp, interleave = ticket.remote_dcp_size, ticket.remote_interleave_size
    if dcp < 1 or ticket.remote_tp_size % dcp:
        raise TicketError(f"remote_dcp_size {dcp} does not divide remote_tp_size {ticket.remote_tp_size}")
    if interleave < 1:
        raise TicketError(f"remote_interleave_size {interleave} is not positive")
    if dcp > 1 and state_groups:
        raise TicketError(f"remote_dcp_size {dcp}: states are not shared by context parallelism")
    for group, (blocks, size) in enumerate(zip(ticket.remote_block_ids, ticket.remote_block_size, strict=True)):
        if group in state_groups:
            if size != 1 or len(blocks) != 1:
                raise TicketError(f"remote_block_ids: {len(blocks)} blocks of {size} for the state in group {group}")
            continue
        if size < 1 or ticket.remote_cached_tokens % (span := ticket.span(group)):
            raise TicketError(f"remote_block_size {size} does not fit remote_cached_tokens")
        if size % interleave:
            raise TicketError(f"remote_interleave_size {interleave} does not divide remote_block_size {size}")
        if len(blocks) * span < ticket.num_tokens or any(block < 0 for block in blocks):
            raise TicketError(f"remote_block_ids: {len(blocks)} blocks of {span} for {ticket.num_tokens} tokens")
    return ticket


class State(enum.Enum):
    OPEN = "open"
    FENCING = "fencing"
    RECEIVED = "received"
    FAILED = "failed"


@dataclass
class _Lease:
    """`until`: by then a writer that runs, or has ended, has stopped, and what it sent has arrived. `reported`: it
    begins no write any more; `settled`: and nothing of it is on its way; `gone`: its process has ended."""

    covers: frozenset[int]
    settle_s: float
    until: float
    reported: bool = False
    settled: bool = False
    gone: bool = False

    def is_over(self, now: float) -> bool:
        return self.settled or (self.gone and now >= self.until)


@dataclass
class ConsumerTicket:
    """What a decode rank knows of a ticket. Times are seconds of one monotonic clock, passed in.

    `attempt`: the one that writes, or wrote last; `lease_s`: how long a grant lasts; each writer says how long a write
    begun within it may outlast it; `reason`: what the attempt, or the ticket, failed of first.
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
    _next: int = 0  # while FENCING: no lower attempt is granted any more
    _asked_at: float = -math.inf  # when a higher attempt last did
    _ended: tuple[float, float] | None = None  # prefill: when, and how long to wait for its writers from then on
    _engine: tuple[str, Sharding] | None = None
    _leases: dict[Writer, _Lease] = field(default_factory=dict)
    _missing: frozenset[tuple[int, int]] = frozenset()  # which tickets of equal shapes share until a writer reports

    @property
    def engine_known(self) -> bool:
        """Of this attempt."""
        return self._engine is not None

    def expect(self, engine_id: str, sharding: Sharding, expected: frozenset[tuple[int, int]]) -> None:
        """Fixes who must write what: pairs (index of our tensor, rank of the writer in its pipeline stage)."""
        assert self.state is State.OPEN
        assert self._engine is None
        self._engine = (engine_id, sharding)
        self._missing = expected

    def admit(self, request: GrantRequest, now: float) -> Refused | Complete | None:
        """Whether the request's attempt may write at all: None, or the answer. A higher attempt than the one that
        writes has its turn when no writer of that can write any more."""
        self.tick(now)
        if request.digest != self.digest:
            return Refused("the ticket was altered", retry=False)
        if self.state is State.RECEIVED:
            return Complete()
        if self.state is State.FAILED:
            return Refused(f"the ticket is failed: {self.reason}", retry=False)
        if request.attempt >= MAX_ATTEMPTS:
            return Refused(f"attempt {request.attempt}: a ticket has at most {MAX_ATTEMPTS}", retry=False)
        if self.state is State.OPEN:
            if request.attempt == self.attempt:
                return None
            if request.attempt > self.attempt:
                self._fence(f"attempt {request.attempt} began before it had ended")
        if request.attempt < self._next:
            return Refused(f"attempt {request.attempt} is over: {self.reason}", retry=False)
        self._next, self._asked_at = request.attempt, now
        if not self._silent(now):
            return Refused(f"attempt {self.attempt} may still write: {self.reason}", retry=True, wait_s=_WAITS_S)
        self._begin(request.attempt, now)
        return None

    def grant(self, request: GrantRequest, now: float) -> Granted | Refused | Complete:
        """Decides a grant request, or a renewal. `expect` must have been called for the request's attempt."""
        if (answer := self.admit(request, now)) is not None:
            return answer
        writer = request.writer
        if self._engine != (writer.engine_id, request.sharding):
            return Refused("another prefill engine is writing for this ticket", retry=False)
        lease = self._leases.get(writer)
        if lease is not None and lease.reported:
            return Refused("this writer has already reported", retry=False)
        covers = frozenset(request.covers)
        if lease is not None and lease.covers != covers:
            return Refused("a renewal must cover what the grant covered", retry=False)
        until = now + self.lease_s + request.settle_s
        if lease is None:
            if self._has_other(writer) or len(self._leases) == MAX_WRITERS:
                return Refused("this prefill rank is or was writing for the ticket in another transfer", retry=False)
            claimed = {(t, w.rank) for w, other in self._leases.items() for t in other.covers}
            if not {(tensor, writer.rank) for tensor in covers} <= self._missing - claimed:
                return Refused("the writer covers tensors that are not its to write", retry=False)
            self._leases[writer] = _Lease(covers, request.settle_s, until)
        else:
            lease.until, lease.settle_s = until, request.settle_s
            lease.gone = False
        return Granted(self.lease_s)

    def report(self, report: Report, now: float) -> bool:
        """A writer has stopped; with `settle_s`, it reports again when nothing of it is on its way any more. Returns
        False for a report that is not to be believed.

        A writer that was never granted anything may say that it cannot serve the ticket, nothing else.
        """
        lease = self._leases.get(report.writer)
        if report.attempt != self.attempt:
            return False
        if lease is None:
            stranger = self._engine is not None and self._engine[0] != report.writer.engine_id
            if report.reason is None or stranger or self._has_other(report.writer):
                return False
            self._fence(f"prefill rank {report.writer.rank}: {report.reason}")
            return True
        first = not lease.reported
        lease.reported, lease.gone = True, False
        if report.settle_s == 0:
            lease.settled = True
        elif first:
            lease.until = now + report.settle_s
        if not first or self.state is not State.OPEN:
            return True
        if report.reason is not None:
            self._fence(f"prefill rank {report.writer.rank}: {report.reason}")
            return True
        self.num_bytes += report.num_bytes
        self.bytes_before_end += report.bytes_before_end
        self._missing -= {(tensor, report.writer.rank) for tensor in lease.covers}
        if not self._missing:
            self.state = State.RECEIVED
        return True

    def gone(self, writer: Writer, now: float) -> None:
        """A writer's connection is closed. Its process has ended; else it says so by what it sends next. It may have
        been stopped until just before, so what it sent last is given its time from now on."""
        lease = self._leases.get(writer)
        if lease is not None and not lease.gone:
            lease.gone = True
            lease.until = max(lease.until, now + lease.settle_s)

    def fail(self, reason: str) -> None:
        """Final unless the ticket already ended. Why an attempt was given up explains more than what came of it."""
        if self.state in (State.OPEN, State.FENCING):
            self.state = State.FAILED
            self.reason = self.reason or reason

    def prefill_has_ended(self, now: float, settle_s: float) -> None:
        """Whoever wants to write has asked for it by now, or will within `settle_s`; else nobody will."""
        self._ended = (now, settle_s)

    def tick(self, now: float) -> None:
        """Lets time pass: a writer whose lease ran out is lost, and so is a ticket past its deadline."""
        if self.state is State.OPEN:
            lost = [w for w, lease in self._leases.items() if not lease.reported and now >= lease.until]
            if lost:
                self._fence(f"prefill rank {lost[0].rank} of engine {lost[0].engine_id} went silent")
            elif now >= self.deadline:
                self.fail("nothing was received" if not self._leases else "the transfer took too long")
            elif self._ended is not None and now >= sum(self._ended) and not self.live_writers():
                self.fail("prefill ended without writing everything")
        if self.state is State.FENCING:
            # Ranks of another attempt ask when it begins: none has, so prefill ended with this one.
            given_up = self._ended is not None and now >= self._ended[0] + min(self._ended[1], _WAITS_S)
            if now >= self.deadline or (given_up and now >= self._asked_at + _WAITS_S):
                self.fail(self.reason)

    def quiet(self, now: float) -> bool:
        """The ticket has ended, and nothing that was granted under it can write any more."""
        return self.state in (State.RECEIVED, State.FAILED) and self._silent(now)

    def live_writers(self) -> list[Writer]:
        """Those that may begin a write, as far as they have said."""
        return [w for w, lease in self._leases.items() if not lease.reported]

    def overdue(self, now: float) -> list[Writer]:
        """Those whose time has passed, but whose process may go on where it was stopped."""
        return [w for w, lease in self._leases.items() if now >= lease.until and not lease.is_over(now)]

    def _silent(self, now: float) -> bool:
        return all(lease.is_over(now) for lease in self._leases.values())

    def _has_other(self, writer: Writer) -> bool:
        """Whether the same rank was granted something in another transfer of this attempt."""
        rank = (writer.engine_id, writer.pp_rank, writer.rank)
        return any((w.engine_id, w.pp_rank, w.rank) == rank for w in self._leases if w != writer)

    def _fence(self, reason: str) -> None:
        """The attempt has failed: what it was granted is taken back."""
        if self.state is State.OPEN:
            self.state = State.FENCING
            self.reason = reason
            self._next = self.attempt + 1

    def _begin(self, attempt: int, now: float) -> None:
        """Everything is to be written again, by whoever comes."""
        self.state, self.attempt, self.reason = State.OPEN, attempt, ""
        self.num_bytes = self.bytes_before_end = 0
        self._engine = None
        self._leases.clear()
        self._missing = frozenset()
        if self._ended is not None:
            self._ended = (now, self._ended[1])
