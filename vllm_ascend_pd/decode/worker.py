# SPDX-License-Identifier: Apache-2.0
"""The decode side of a worker: gives grants, takes reports, and tells vLLM which requests' KV has arrived.

One lock guards the tickets. They change on the side channel's thread (grants, reports, time) and on the model's
thread (new tickets, cancellations); nobody waits for anything while holding the lock.
"""

import functools
import logging
import math
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.caches import RegisteredCaches
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.decode_ticket import MAX_TOMBSTONES, DecodeTicket, TicketState
from vllm_ascend_pd.core.host_clock import HOST_CLOCK
from vllm_ascend_pd.core.observer import DecodeObserver
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    ClockReading,
    Complete,
    Granted,
    GrantRefused,
    GrantRequest,
    Message,
    Problem,
    RankDescription,
    ReadClock,
    Revoke,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.rank_info import RankInfo
from vllm_ascend_pd.core.step import DecodeStep, Expect, WorkerReport
from vllm_ascend_pd.core.ticket import MAX_TP, replica_hash_of
from vllm_ascend_pd.core.weights import LoadedWeights, WeightUpdates
from vllm_ascend_pd.device.base import Device, Event
from vllm_ascend_pd.transport.curve import load_keys
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.side_channel import ClientConnection, SideChannelServer
from vllm_ascend_pd.transport.wakeup import WakeupSender

logger = logging.getLogger(__name__)

# Prefill engines of that many different shapes at once; of more, what they must write is worked out again.
_MAX_SHAPES = 1024
# How often a writer is told again to stop, which is also how it is found out that its process has ended.
_REVOKE_EVERY_S = 1.0
_WARN_EVERY_S = 60.0


@dataclass
class _OpenTicket:
    """`vacated`: the end of what was queued here when the ticket came; `weights_version`: of this engine's weights
    when the attempt's first grant was given, or the ticket came if some of its prompt is cached; `peers`: where each
    writer was heard last; `revoked`: when it was last told to stop; `given_up`: the last attempt that was; `warn_at`:
    when to say again that blocks are kept for a writer that does not answer."""

    expect: Expect
    ticket: DecodeTicket
    vacated: Event
    weights_version: int | None = None
    peers: dict[WriterId, ClientConnection] = field(default_factory=dict)
    revoked: dict[WriterId, float] = field(default_factory=dict)
    given_up: int = -1
    lost: bool = False
    warn_at: float = -math.inf


@dataclass(frozen=True)
class _Closed:
    """How a ticket ended, for who comes late."""

    digest: str
    state: TicketState
    reason: str


@dataclass(frozen=True)
class Arrivals:
    """What this step learns. `lost_blocks`: blocks of requests that have just failed, so that vLLM can say so at
    once. `finished`: requests that nobody can write for any more, whose blocks may be used or freed; `failed` is
    a subset of it."""

    finished: set[str]
    failed: set[str]
    lost_blocks: set[int]


class DecodeWorker:
    """`loaded`: the model's weights, None if they are not known."""

    def __init__(
        self,
        identity: RankInfo,
        config: ConnectorConfig,
        device: Device,
        engine: TransferEngine,
        caches: RegisteredCaches,
        loaded: LoadedWeights | None = None,
        observer: DecodeObserver | None = None,
    ) -> None:
        self._identity = identity
        self._loaded = loaded or LoadedWeights()
        self._updates = WeightUpdates(f"{identity.pp_rank}/{identity.rank}", self._loaded)
        self._config = config
        self._device = device
        self._caches = caches.description
        self._changed = threading.Condition()
        self._entries: dict[str, _OpenTicket] = {}
        self._closed: OrderedDict[str, _Closed] = OrderedDict()  # by ticket id
        self._expected: dict[tuple[topology.Sharding, int, str], frozenset[tuple[int, int]]] = {}
        self._ended: list[_OpenTicket] = []
        self._lost: set[int] = set()
        self._report = WorkerReport()
        self._wait_s = 0.0
        self._waiting = False
        self._ringer, self._doorbell = WakeupSender(), ""
        self._brought = False  # the last step something that had ended
        self._observer = observer or DecodeObserver()
        keys = load_keys(config.side_channel_key_file)
        self._server = SideChannelServer(identity.host, 0, self._handle, self._tick, name="pd-grants", keys=keys)
        self.description = RankDescription(
            identity.pp_rank, identity.tp_rank, self._server.endpoint, engine.session, self._caches, engine.transport
        )

    # Called by vLLM, on the model's thread.

    def start_step(self, step: DecodeStep) -> None:
        now = time.monotonic()
        vacated = self._device.record_event() if step.expects else None
        with self._changed:
            self._wait_s, self._doorbell = step.wait_s, step.doorbell
            for expect in step.expects:
                ticket = DecodeTicket(
                    expect.ticket_id,
                    expect.attempt,
                    expect.digest,
                    now + self._config.queue_timeout_s,
                    self._config.transfer_timeout_s,
                    self._config.lease_s,
                )
                assert vacated is not None
                version = None
                if expect.cached_tokens:
                    stale = self._updates.are_unknown_to(step.weight_updates)
                    version = -1 if stale else self._loaded.current.version  # -1: refused when prefill asks
                self._entries[expect.ticket_id] = _OpenTicket(expect, ticket, vacated, version)
                self._observer.ticket_received(expect.request_id, expect.ticket_id)
            for ticket_id in step.prefilled:
                if entry := self._entries.get(ticket_id):
                    entry.ticket.prefill_has_ended(now, self._config.settle_timeout_s)
            for ticket_id, reason in step.cancelled.items():
                if entry := self._entries.get(ticket_id):
                    entry.ticket.fail(reason)
                    self._settle(entry, now)

    def take_arrivals(self) -> Arrivals:
        """Each ticket ends here once. Waits for one as long as the step says, unless the last step brought one that
        the scheduler may not have seen when it made this step: what it computes next is not to wait."""
        with self._changed:
            if self._wait_s and self._entries and not self._brought:
                self._waiting = True
                self._changed.wait_for(lambda: bool(self._ended or self._lost), self._wait_s)
                self._waiting = False
            ended, self._ended = self._ended, []
            lost, self._lost = self._lost, set()
            self._brought = bool(ended or lost)
        failed = [entry for entry in ended if entry.ticket.state is TicketState.FAILED]
        return Arrivals(
            {entry.expect.request_id for entry in ended},
            {entry.expect.request_id for entry in failed},
            lost,
        )

    def take_report(self) -> WorkerReport | None:
        with self._changed:
            report, self._report = self._report, WorkerReport()
            report.weight_updates = self._updates.take_news()
        return report or None

    def close(self, timeout_s: float) -> None:
        self._server.close(timeout_s)
        self._ringer.close()
        self._observer.close(timeout_s)

    # On the side channel's thread.

    def _handle(self, message: Message, peer: ClientConnection) -> Message:
        now = time.monotonic()
        with self._changed:
            if isinstance(message, GrantRequest):
                answer = self._grant(message, peer, now)
                if entry := self._entries.get(message.ticket_id):
                    self._settle(entry, now)  # a higher attempt that asks ends the one before
                return answer
            if isinstance(message, WriteReport):
                entry = self._entries.get(message.ticket_id)
                if entry and message.reason is None and self._updated_since_grant(entry):
                    reason = "decode's weights were updated before all KV was here"
                    message = msgspec.structs.replace(message, reason=reason)
                # The digest shows that it comes from who has the ticket: nobody ends another's transfer.
                if entry and message.digest == entry.ticket.digest and entry.ticket.report(message, now):
                    if message.writer in entry.peers:
                        entry.peers[message.writer] = peer
                    self._observer.report_received(entry.expect.request_id, message.ticket_id, message.writer)
                    self._settle(entry, now)
                return Acknowledged()
            if isinstance(message, ReadClock):
                entry = self._entries.get(message.ticket_id)
                if entry is None or entry.ticket.digest != message.digest:
                    return Problem("the ticket is not open here")
                return ClockReading(HOST_CLOCK, now, time.monotonic())
        return Problem(f"a decode rank does not serve {type(message).__name__}")

    def _grant(self, request: GrantRequest, peer: ClientConnection, now: float) -> Granted | GrantRefused | Complete:
        entry = self._entries.get(request.ticket_id)
        if entry is None:
            ended = self._closed.get(request.ticket_id)
            if ended is None:
                return GrantRefused("the ticket is not known here", retry=True)
            if ended.state is TicketState.RECEIVED and ended.digest == request.digest:
                return Complete()
            return GrantRefused(f"the ticket is closed: {ended.reason or ended.state.value}", retry=False)
        ticket = entry.ticket
        attempt = ticket.attempt
        refused = ticket.admit(request, now)
        if ticket.attempt != attempt:
            entry.peers.clear()
            entry.revoked.clear()
            entry.warn_at = -math.inf
            if not entry.expect.cached_tokens:
                entry.weights_version = None
        if refused is not None:
            return refused
        if entry.expect.cached_tokens and entry.weights_version != self._loaded.current.version:
            ticket.fail("decode's weights were updated, and a part of the prompt was cached before")
            return GrantRefused(ticket.reason, retry=False)
        if (refused := self._other_weights(request)) is not None:
            return refused
        # vLLM gives the blocks of a request that has ended to the next one while a step that still computes for the
        # first may be queued, which is right for what runs after that on the same stream: these writes do not.
        if not entry.vacated.is_done():
            return GrantRefused("steps queued before the ticket may still write to its blocks", retry=True)
        ranks = len(request.sharding.shares)
        if ranks > MAX_TP or request.writer.rank >= ranks:
            return GrantRefused(f"rank {request.writer.rank} of {ranks} ranks in a pipeline stage", retry=False)
        # Only who has the ticket decides which engine writes for it.
        if not ticket.engine_known and (request.attempt, request.digest) == (ticket.attempt, ticket.digest):
            try:
                expected = self._expected_from(request.sharding, replica_hash_of(request.ticket_id), request.draft)
            except topology.TopologyError as error:
                return GrantRefused(str(error), retry=False)
            ticket.expect(request.writer.engine_id, request.sharding, expected)
        answer = ticket.grant(request, now)
        if not isinstance(answer, Granted):
            return answer
        if request.writer not in entry.peers:
            self._observer.grant_sent(entry.expect.request_id, request.ticket_id, request.writer)
        entry.peers[request.writer] = peer
        if entry.weights_version is None:
            entry.weights_version = self._loaded.current.version
        return answer

    def _other_weights(self, request: GrantRequest) -> GrantRefused | None:
        """Why KV that prefill computes with its weights is of no use here (R8). Asked at every renewal, since either
        side's may be updated."""
        current = self._loaded.current
        if current.loading:
            return GrantRefused("weights are being loaded here", retry=True)
        theirs, ours = request.weights, current.fingerprint
        if self._config.allow_other_model or not (theirs and ours) or theirs == ours:
            return None
        return GrantRefused(
            f"prefill computed with weights {theirs}, this engine has {ours}: the engines loaded other checkpoints, or "
            "one was updated",
            retry=False,
        )

    def _updated_since_grant(self, entry: _OpenTicket) -> bool:
        version = self._loaded.current.version
        return not self._config.allow_other_model and entry.weights_version not in (None, version)

    def _expected_from(self, prefill: topology.Sharding, replica_hash: int, draft: str) -> frozenset[tuple[int, int]]:
        """(index of our tensor, prefill rank that must write to it), in each of prefill's pipeline stages. Our draft
        layers get nothing unless `draft`, what drafts on prefill, is the same as here."""
        key = (prefill, replica_hash % len(prefill.shares), draft if draft == self._caches.draft else "")
        if key not in self._expected:
            if len(self._expected) >= _MAX_SHAPES:
                self._expected.clear()
            totals = {
                index: geometry.total_heads
                for index, tensor in enumerate(self._caches.tensors)
                if (geometry := self._caches.geometry_of(tensor)).is_known_to(key[2])
            }
            us = self._identity
            writers = {t: topology.writers_to(us.rank, us.sharding, prefill, t, key[1]) for t in {*totals.values()}}
            self._expected[key] = frozenset(
                (index, writer) for index, total in totals.items() for writer in writers[total]
            )
        return self._expected[key]

    def _tick(self, now: float) -> None:
        with self._changed:
            for entry in list(self._entries.values()):
                entry.ticket.tick(now)
                self._settle(entry, now)

    def _settle(self, entry: _OpenTicket, now: float) -> None:
        """Revokes a ticket that failed, and ends one that nobody can write to any more. Under the lock; only the entry
        that a message was about, so that one costs the same however many tickets are open."""
        ticket = entry.ticket
        if ticket.state is TicketState.OPEN:
            return
        ticket_id, request_id = ticket.ticket_id, entry.expect.request_id
        if ticket.state is TicketState.FENCING and entry.given_up < ticket.attempt:
            entry.given_up = ticket.attempt
            logger.warning(
                "request %s: attempt %d failed: %s: it waits for another prefill engine",
                request_id,
                ticket.attempt,
                ticket.reason,
            )
            self._report.given_up[ticket_id] = (ticket.attempt, ticket.reason)
        if ticket.state is TicketState.FAILED and not entry.lost:
            entry.lost = True
            logger.warning(
                "request %s: no KV received: %s: it ends, or is computed here (kv_load_failure_policy)",
                request_id,
                ticket.reason,
            )
            self._report.failed[ticket_id] = ticket.reason
            self._lost.update(entry.expect.blocks)
            self._wake()
        self._revoke(entry, now)
        if not ticket.quiet(now):
            return
        del self._entries[ticket_id]
        self._closed[ticket_id] = _Closed(ticket.digest, ticket.state, ticket.reason)
        while len(self._closed) > MAX_TOMBSTONES:
            self._closed.popitem(last=False)
        self._observer.ticket_ended(request_id, ticket_id, ticket.state is TicketState.RECEIVED)
        if ticket.state is TicketState.RECEIVED:
            self._report.received[ticket_id] = (ticket.num_bytes, ticket.bytes_before_end)
            self._report.cached[ticket_id] = ticket.cached_tokens or 0
        self._ended.append(entry)
        self._wake()

    def _wake(self) -> None:
        """Whoever waits for what has just ended: a step, or else the scheduler before the next one."""
        if self._waiting or not self._doorbell:
            self._changed.notify_all()
        else:
            self._ringer.ring(self._doorbell)

    def _revoke(self, entry: _OpenTicket, now: float) -> None:
        """Tells writers to stop, again and again until they have, or their processes have ended."""
        ticket = entry.ticket
        overdue = ticket.overdue(now)
        live = [] if ticket.state is TicketState.RECEIVED else ticket.live_writers()
        for writer in {*live, *overdue}:
            if now - entry.revoked.get(writer, -math.inf) >= _REVOKE_EVERY_S:
                entry.revoked[writer] = now
                peer = entry.peers[writer]
                revoke = Revoke(ticket.ticket_id, ticket.attempt, writer, ticket.reason, ticket.digest)
                peer.send(revoke, functools.partial(self._on_gone, entry, writer, peer))
        if overdue and now >= entry.warn_at:
            if entry.warn_at > -math.inf:
                logger.warning(
                    "request %s: its blocks are kept for prefill rank %d of engine %s, which neither says that it has "
                    "stopped writing nor has ended: continue or kill its process",
                    entry.expect.request_id,
                    overdue[0].rank,
                    overdue[0].engine_id,
                )
            entry.warn_at = now + (_WARN_EVERY_S if entry.warn_at > -math.inf else 2 * _REVOKE_EVERY_S)

    def _on_gone(self, entry: _OpenTicket, writer: WriterId, peer: ClientConnection) -> None:
        """Nobody listens where the writer was heard last."""
        with self._changed:
            if entry.peers.get(writer) == peer:
                now = time.monotonic()
                entry.ticket.gone(writer, now)
                if entry.ticket.ticket_id in self._entries:
                    self._settle(entry, now)


def encode_description(description: RankDescription) -> bytes:
    return msgspec.msgpack.encode(description)


def decode_description(encoded: bytes) -> RankDescription:
    return msgspec.msgpack.decode(encoded, type=RankDescription)
