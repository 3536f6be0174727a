# SPDX-License-Identifier: Apache-2.0
"""The decode side of a worker: gives grants, takes reports, and tells vLLM which requests' KV has arrived.

One lock guards the tickets. They change on the side channel's thread (grants, reports, time) and on the model's
thread (new tickets, cancellations); nobody waits for anything while holding the lock.
"""

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from vllm_ascend_pd.config import ConnectorConfig
from vllm_ascend_pd.core import topology
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    Granted,
    GrantRequest,
    Message,
    Problem,
    RankDescription,
    Refused,
    Report,
    Revoke,
    Writer,
)
from vllm_ascend_pd.core.ticket import MAX_TOMBSTONES, MAX_TP, ConsumerTicket, State, salt_of
from vllm_ascend_pd.step import ConsumerStep, Expect, WorkerReport
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.side_channel import Peer, Server
from vllm_ascend_pd.worker.caches import RegisteredCaches
from vllm_ascend_pd.worker.identity import Identity

logger = logging.getLogger(__name__)


@dataclass
class _Entry:
    expect: Expect
    ticket: ConsumerTicket
    peers: dict[Writer, Peer]
    revoked: bool = False


@dataclass(frozen=True)
class Arrivals:
    """What this step learns. `lost_blocks`: blocks of requests that have just failed, so that vLLM can say so at
    once. `finished`: requests that nobody can write for any more, whose blocks may be used or freed; `failed` is
    a subset of it."""

    finished: set[str]
    failed: set[str]
    lost_blocks: set[int]


class ConsumerWorker:
    def __init__(
        self, identity: Identity, config: ConnectorConfig, engine: TransferEngine, caches: RegisteredCaches
    ) -> None:
        self._identity = identity
        self._config = config
        self._caches = caches.description
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()  # ticket id -> how it ended
        self._expected: dict[tuple[topology.Sharding, int, str], frozenset[tuple[int, int]]] = {}
        self._ended: list[_Entry] = []
        self._lost: set[int] = set()
        self._report = WorkerReport()
        self._idle = False
        self._server = Server(identity.host, 0, self._handle, self._tick, name="pd-grants")
        self.description = RankDescription(
            identity.pp_rank, identity.tp_rank, self._server.endpoint, engine.session, self._caches
        )

    # Called by vLLM, on the model's thread.

    def start_step(self, step: ConsumerStep) -> None:
        now = time.monotonic()
        with self._changed:
            self._idle = step.idle
            for expect in step.expects:
                ticket = ConsumerTicket(
                    expect.ticket_id,
                    expect.attempt,
                    expect.digest,
                    now + self._config.transfer_timeout_s,
                    self._config.lease_s,
                )
                self._entries[expect.ticket_id] = _Entry(expect, ticket, {})
            for ticket_id in step.prefilled:
                if entry := self._entries.get(ticket_id):
                    entry.ticket.prefill_has_ended(now + self._config.settle_timeout_s)
            for ticket_id, reason in step.cancelled.items():
                if entry := self._entries.get(ticket_id):
                    entry.ticket.fail(reason)
            self._settle(now)

    def take_arrivals(self) -> Arrivals:
        """Each ticket ends here once. With nothing to compute, waits a moment for one."""
        with self._changed:
            if self._idle and self._entries:
                self._changed.wait_for(lambda: bool(self._ended or self._lost), self._config.idle_wait_s)
            ended, self._ended = self._ended, []
            lost, self._lost = self._lost, set()
        failed = [entry for entry in ended if entry.ticket.state is State.FAILED]
        return Arrivals(
            {entry.expect.request_id for entry in ended},
            {entry.expect.request_id for entry in failed},
            lost,
        )

    def take_report(self) -> WorkerReport | None:
        with self._changed:
            report, self._report = self._report, WorkerReport()
        return report if report.failed or report.received else None

    def close(self, timeout_s: float) -> None:
        self._server.close(timeout_s)

    # On the side channel's thread.

    def _handle(self, message: Message, peer: Peer) -> Message:
        now = time.monotonic()
        with self._changed:
            if isinstance(message, GrantRequest):
                return self._grant(message, peer, now)
            if isinstance(message, Report):
                if (entry := self._entries.get(message.ticket_id)) and entry.ticket.report(message, now):
                    self._settle(now)
                return Acknowledged()
        return Problem(f"a decode rank does not serve {type(message).__name__}")

    def _grant(self, request: GrantRequest, peer: Peer, now: float) -> Granted | Refused:
        entry = self._entries.get(request.ticket_id)
        if entry is None:
            ended = self._closed.get(request.ticket_id)
            if ended is not None:
                return Refused(f"the ticket is closed: {ended}", retry=False)
            return Refused("the ticket is not known here", retry=True)
        ticket = entry.ticket
        ranks = len(request.sharding.shares)
        if ranks > MAX_TP:
            return Refused(f"{ranks} ranks in a pipeline stage", retry=False)
        if not ticket.engine_known:
            try:
                expected = self._expected_from(request.sharding, salt_of(request.ticket_id), request.draft)
            except topology.TopologyError as error:
                return Refused(str(error), retry=False)
            ticket.expect(request.writer.engine_id, request.sharding, expected)
        answer = ticket.grant(request, now)
        if isinstance(answer, Granted):
            entry.peers[request.writer] = peer
        return answer

    def _expected_from(self, prefill: topology.Sharding, salt: int, draft: str) -> frozenset[tuple[int, int]]:
        """(index of our tensor, prefill rank that must write to it), in each of prefill's pipeline stages. Our draft
        layers get nothing unless `draft`, what drafts on prefill, is the same as here."""
        key = (prefill, salt % len(prefill.shares), draft if draft == self._caches.draft else "")
        if key not in self._expected:
            self._expected[key] = frozenset(
                (index, writer)
                for index, tensor in enumerate(self._caches.tensors)
                if self._caches.geometry_of(tensor).is_known_to(key[2])
                for writer in topology.writers_to(
                    self._identity.rank,
                    self._identity.sharding,
                    prefill,
                    self._caches.geometry_of(tensor).total_heads,
                    key[1],
                )
            )
        return self._expected[key]

    def _tick(self, now: float) -> None:
        with self._changed:
            for entry in self._entries.values():
                entry.ticket.tick(now)
            self._settle(now)

    def _settle(self, now: float) -> None:
        """Revokes what failed, and ends what nobody can write to any more. Under the lock."""
        for ticket_id, entry in list(self._entries.items()):
            ticket = entry.ticket
            if ticket.state is State.FAILED and not entry.revoked:
                entry.revoked = True
                logger.warning("request %s: no KV received: %s", entry.expect.request_id, ticket.reason)
                self._report.failed[ticket_id] = ticket.reason
                self._lost.update(entry.expect.blocks)
                self._changed.notify_all()
                for writer in ticket.live_writers():
                    entry.peers[writer].send(Revoke(ticket_id, ticket.reason))
            if ticket.state is State.OPEN or not ticket.quiet(now):
                continue
            del self._entries[ticket_id]
            self._closed[ticket_id] = ticket.reason or ticket.state.value
            while len(self._closed) > MAX_TOMBSTONES:
                self._closed.popitem(last=False)
            if ticket.state is State.RECEIVED:
                self._report.received[ticket_id] = (ticket.num_bytes, ticket.bytes_before_end)
            self._ended.append(entry)
            self._changed.notify_all()


def encode_description(description: RankDescription) -> bytes:
    return msgspec.msgpack.encode(description)


def decode_description(encoded: bytes) -> RankDescription:
    return msgspec.msgpack.decode(encoded, type=RankDescription)
