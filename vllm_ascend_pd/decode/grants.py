# SPDX-License-Identifier: Apache-2.0
"""Answers prefill ranks on a decode rank: gives grants, takes reports, and revokes what must not be written any more.

The control thread (`pd-grants`) owns `GrantService` and every ticket in it. The model thread hands over new tickets and
cancellations by `SideChannelServer.call`, and gets what has ended through an `ArrivalQueue`.
"""

import functools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.decode_ticket import MAX_TOMBSTONES, DecodeTicket, TicketState
from vllm_ascend_pd.core.layout import RankCaches
from vllm_ascend_pd.core.observer import Observer, TicketClosed, TicketExpected
from vllm_ascend_pd.core.protocol import (
    Acknowledged,
    Granted,
    GrantRefused,
    GrantRequest,
    Message,
    Problem,
    Revoke,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.core.step import DecodeStep, Expect
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import replica_hash_of
from vllm_ascend_pd.core.topology import Sharding, TopologyError
from vllm_ascend_pd.core.weights import LoadedWeights, are_alike
from vllm_ascend_pd.decode.arrivals import ArrivalQueue, Arrivals
from vllm_ascend_pd.decode.checksums import Delivered, Reported
from vllm_ascend_pd.decode.expected_writers import ExpectedWriters, expected_writers
from vllm_ascend_pd.device.event import Event
from vllm_ascend_pd.transport.side_channel import ClientConnection

logger = logging.getLogger(__name__)

# Seconds between two revocations of one writer. The second one also shows whether the writer's process has ended.
_REVOKE_EVERY_S = 1.0
# Seconds between two warnings about a writer that does not answer.
_WARN_EVERY_S = 60.0

ASLEEP = "decode sleeps (/sleep)"

UNKNOWN_WEIGHTS = -1
"""As `OpenTicket.weights_version`: the weights changed before the ticket was issued, so its grants are refused."""


@dataclass
class OpenTicket:
    """A ticket that prefill ranks may still write for. The control thread owns it."""

    # What the scheduler said of it.
    expect: Expect
    # Who may write, and what is still missing.
    ticket: DecodeTicket
    # Happens when steps that were queued before the ticket have ended: until then they may write to its blocks.
    vacated: Event
    # Version of this engine's weights that the KV must fit. None until the first grant, if decode has no part of the
    # prompt in its cache.
    weights_version: int | None = None
    # What writers with success have reported for `verify_kv`. Empty unless the ticket is verified.
    reported: dict[WriterId, Reported] = field(default_factory=dict)
    # The connection that each writer last used.
    connections: dict[WriterId, ClientConnection] = field(default_factory=dict)
    # When each writer was last told to stop, in seconds of `time.monotonic`.
    revoked_at: dict[WriterId, float] = field(default_factory=dict)
    # Whether the ticket's failure was reported.
    failure_reported: bool = False
    # When to warn again that a writer does not answer.
    warn_at: float = -math.inf
    # How many shapes of prefill engines were worked out for it.
    shapes_worked_out: int = 0


class GrantService:
    """The open tickets of one decode rank. All methods run on the control thread."""

    def __init__(
        self,
        config: ConnectorConfig,
        caches: RankCaches,
        rank: int,
        sharding: Sharding,
        loaded: LoadedWeights,
        arrivals: ArrivalQueue,
        observer: Observer,
        apply_s: float,
    ) -> None:
        """`caches`, `rank`, `sharding`: as `expected_writers` has them. `loaded`: this engine's weights. `arrivals`:
        gets what has ended. `apply_s`: as `TransferLimits.apply_s`."""
        self._config = config
        # The draft that layers here belong to.
        self._draft = caches.draft
        # Most tickets come from prefill engines of one shape.
        self._expected_writers = ExpectedWriters(functools.partial(expected_writers, caches, rank, sharding))
        self._loaded = loaded
        self._arrivals = arrivals
        self._observer = observer
        self._apply_s = apply_s
        # Notices that this process was stopped, and how long it was until the last look.
        self._running_time = RunningTime()
        self._stopped_s = 0.0
        # By ticket id.
        self._open: dict[str, OpenTicket] = {}
        # Ticket id -> how it ended, for prefill ranks that ask too late. The oldest first, at most `MAX_TOMBSTONES`.
        self._closed: OrderedDict[str, str] = OrderedDict()
        # Whether a warning has said that checksums come and are not compared.
        self._told_unverified = False
        # Set when no ticket is open. None unless the engine sleeps.
        self._quiet: threading.Event | None = None

    # The model thread posts these.

    @owned
    def begin_step(self, tickets: Iterable[OpenTicket], step: DecodeStep, now: float) -> None:
        """Takes what the scheduler says in a step. `tickets`: those of `step.expects`."""
        for new in tickets:
            self._open[new.ticket.ticket_id] = new
            self._observer.on(TicketExpected(new.expect.request_id, new.ticket.ticket_id))
        for ticket_id in step.prefilled:  # prefill has answered: its ranks ask for a grant soon, or not at all
            if opened := self._open.get(ticket_id):
                opened.ticket.prefill_has_ended(now, self._config.settle_timeout_s)
        self._cancel(step.cancelled, now)

    def _cancel(self, reasons: dict[str, str], now: float) -> None:
        """The KV of these tickets is no longer wanted. `reasons`: by ticket id."""
        for ticket_id, reason in reasons.items():
            if opened := self._open.get(ticket_id):
                opened.ticket.fail(reason)
                self._advance(opened, now)

    @owned
    def sleep(self, quiet: threading.Event, now: float) -> None:
        """Fails all tickets, and grants nothing until `wake`. Sets `quiet` once no writer can write any more."""
        self._quiet = quiet
        self._cancel(dict.fromkeys(self._open, ASLEEP), now)
        if not self._open:
            quiet.set()

    @owned
    def wake(self) -> None:
        """Ends `sleep`."""
        self._quiet = None

    # The side channel calls these.

    @owned
    def handle(self, message: Message, connection: ClientConnection) -> Message:
        """Answers a prefill rank."""
        now = time.monotonic()
        if isinstance(message, GrantRequest):
            answer = self._grant(message, connection, now)
            if opened := self._open.get(message.ticket_id):
                self._advance(opened, now)
            return answer
        if isinstance(message, WriteReport):
            self._report(message, connection, now)
            return Acknowledged()
        return Problem(f"a decode rank does not serve {type(message).__name__}")

    @owned
    def tick(self, now: float) -> None:
        """Lets time pass for every open ticket."""
        self._notice_stop()
        for opened in list(self._open.values()):
            opened.ticket.tick(now)
            self._advance(opened, now)

    def _grant(self, request: GrantRequest, connection: ClientConnection, now: float) -> Granted | GrantRefused:
        if self._quiet is not None:
            return GrantRefused(ASLEEP, retry=False)
        opened = self._open.get(request.ticket_id)
        if opened is None:
            if (ended := self._closed.get(request.ticket_id)) is not None:
                return GrantRefused(f"the ticket is closed: {ended}", retry=False)
            return GrantRefused("the ticket is not known here", retry=True)  # the scheduler's step may bring it
        ticket = opened.ticket
        if (refused := ticket.admit(request, now)) is not None:
            return refused
        if opened.expect.cached_tokens and self._weights_changed(opened):
            ticket.fail("decode's weights were updated, and a part of the prompt was cached before")
            return GrantRefused(ticket.reason, retry=False)
        if (refused := self._refuse_weights(request)) is not None:
            return refused
        # vLLM gives the blocks of an ended request to the next one while a step that computes for the first is still
        # queued. Later work on the same stream runs after that step. A prefill rank's write does not.
        if not opened.vacated.is_done():
            return GrantRefused("steps queued before the ticket may still write to its blocks", retry=True)
        ranks = len(request.sharding.shares)
        if request.writer.rank >= ranks:
            return GrantRefused(f"rank {request.writer.rank} of {ranks} ranks in a pipeline stage", retry=False)
        if not ticket.is_owned:
            replica = replica_hash_of(request.ticket_id) % ranks
            draft = request.draft if request.draft == self._draft else ""  # all other drafts have one cached result
            try:
                expected = self._expected_writers.of(opened, request.sharding, replica, draft)
            except TopologyError as error:
                return GrantRefused(str(error), retry=False)
            ticket.expect(request.writer.engine_id, request.sharding, expected)
        answer = ticket.grant(request, now)
        if not isinstance(answer, Granted):
            return answer
        opened.connections[request.writer] = connection
        if opened.weights_version is None:
            opened.weights_version = self._loaded.current.version
        return answer

    def _refuse_weights(self, request: GrantRequest) -> GrantRefused | None:
        """Refuses KV of other weights than ours (R8). Renewals are checked too: either side may update its weights."""
        current = self._loaded.current
        if current.loading:
            return GrantRefused("weights are being loaded here", retry=True)
        theirs, ours = request.weights, current.fingerprint
        if self._config.allow_other_model or are_alike(theirs, ours):
            return None
        return GrantRefused(
            f"prefill computed with weights {theirs}, this engine has {ours}: the engines loaded other checkpoints, or "
            "one was updated",
            retry=False,
        )

    def _report(self, report: WriteReport, connection: ClientConnection, now: float) -> None:
        opened = self._open.get(report.ticket_id)
        # Only a writer that has the ticket knows its digest: nobody else may end the transfer.
        if opened is None or report.digest != opened.ticket.digest:
            return
        if report.reason is None and self._weights_changed(opened):
            report = msgspec.structs.replace(report, reason="decode's weights were updated before all KV was here")
        if not opened.ticket.report(report, now):
            return
        if report.checksums and not self._config.verified_share and not self._told_unverified:
            self._told_unverified = True
            logger.warning(
                "prefill engine %s sends checksums of KV, and nothing is compared: `verify_kv` is off here",
                report.writer.engine_id,
            )
        if report.reason is None and opened.expect.verified is not None:
            covers = tuple(sorted(opened.ticket.covers(report.writer)))
            opened.reported.setdefault(report.writer, Reported(report.writer, covers, report.checksums))
        if report.writer in opened.connections:
            opened.connections[report.writer] = connection
        self._advance(opened, now)

    def _weights_changed(self, opened: OpenTicket) -> bool:
        """Whether the ticket's KV must fit other weights than those of now."""
        version = self._loaded.current.version
        return not self._config.allow_other_model and opened.weights_version not in (None, version)

    def _advance(self, opened: OpenTicket, now: float) -> None:
        """Does what a ticket's state asks for: reports failures, revokes grants, closes the ticket.

        Looks at one ticket only, so that a message costs the same however many tickets are open.
        """
        self._notice_stop()
        ticket = opened.ticket
        if ticket.state is TicketState.OPEN:
            return
        ticket_id, request_id = ticket.ticket_id, opened.expect.request_id
        if ticket.state is TicketState.FAILED and not opened.failure_reported:
            opened.failure_reported = True
            logger.warning(
                "request %s: no KV received: %s: it ends, or is computed here (kv_load_failure_policy)",
                request_id,
                ticket.reason,
            )
            # If the ticket ends at once, that wakes the step, which learns both together.
            fail = functools.partial(
                Arrivals.ticket_failed,
                expect=opened.expect,
                reason=ticket.reason,
                by_prefill=ticket.failed_by_prefill,
            )
            self._arrivals.add(fail, wakes=not ticket.is_quiesced(now))
        self._revoke(opened, now)
        if not ticket.is_quiesced(now):
            return
        del self._open[ticket_id]
        if self._quiet is not None and not self._open:
            self._quiet.set()
        self._closed[ticket_id] = ticket.reason or ticket.state.value
        while len(self._closed) > MAX_TOMBSTONES:
            self._closed.popitem(last=False)
        is_received = ticket.state is TicketState.RECEIVED
        self._observer.on(TicketClosed(request_id, ticket_id, is_received))
        received = (ticket.num_bytes, ticket.bytes_before_end) if is_received else None
        verified, prefill = opened.expect.verified, ticket.sharding
        if received is not None and verified is not None and prefill is not None:
            reports = tuple(opened.reported.values())
            delivered = Delivered(opened.expect, verified, received, ticket.cached_tokens, prefill, reports)
            self._arrivals.add(lambda news: news.delivered.append(delivered))
            return
        self._arrivals.add(lambda news: news.ticket_closed(opened.expect, received, ticket.cached_tokens))

    def _notice_stop(self) -> None:
        """Keeps all blocks for a while if this process was stopped since the last call (R2). Call it often."""
        self._running_time()
        if self._running_time.stopped_s > self._stopped_s:
            self._stopped_s = self._running_time.stopped_s
            for opened in self._open.values():
                opened.ticket.resumed(time.monotonic(), self._apply_s)

    def _revoke(self, opened: OpenTicket, now: float) -> None:
        """Tells writers to stop, every second until they report or their processes end."""
        ticket = opened.ticket
        overdue = ticket.overdue(now)
        live = [] if ticket.state is TicketState.RECEIVED else ticket.live_writers()
        for writer in dict.fromkeys([*live, *overdue]):  # each once, in an order that the simulation repeats
            if now - opened.revoked_at.get(writer, -math.inf) >= _REVOKE_EVERY_S:
                opened.revoked_at[writer] = now
                connection = opened.connections[writer]
                revoke = Revoke(ticket.ticket_id, writer, ticket.reason, ticket.digest)
                connection.send(revoke, functools.partial(self._connection_closed, opened, writer, connection))
        if overdue and now >= opened.warn_at:
            if opened.warn_at > -math.inf:
                logger.warning(
                    "request %s: its blocks are kept for prefill rank %d of engine %s, which has not "
                    "reported that it stopped writing, and has not ended: continue or kill its process. If its host "
                    "is dead, they come back when the connection has ended (net.ipv4.tcp_retries2)",
                    opened.expect.request_id,
                    overdue[0].rank,
                    overdue[0].engine_id,
                )
            opened.warn_at = now + (_WARN_EVERY_S if opened.warn_at > -math.inf else 2 * _REVOKE_EVERY_S)

    def _connection_closed(self, opened: OpenTicket, writer: WriterId, connection: ClientConnection) -> None:
        """A revocation found the writer's connection closed, so its process has ended unless it uses another one."""
        if opened.connections.get(writer) == connection:
            now = time.monotonic()
            opened.ticket.gone(writer, now)
            if opened.ticket.ticket_id in self._open:
                self._advance(opened, now)
