# SPDX-License-Identifier: Apache-2.0
"""The control plane of a prefill rank: one thread that owns the state of all transfers and engines.

It has decode engines describe themselves, asks for grants, renews them and reports. The model's thread and senders
post messages to it. They share each transfer's `PrefillTicket`, and the model's thread reads `Outcome`s.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from vllm_ascend_pd.core.checksum import is_selected
from vllm_ascend_pd.core.compatibility import why_misfit
from vllm_ascend_pd.core.described_engine import why_foreign, why_unsound
from vllm_ascend_pd.core.observer import GrantAnswered, OutcomeReported, WritingEnded
from vllm_ascend_pd.core.prefill_ticket import GRANT_RETRY_S, Destination, Phase, RankKey
from vllm_ascend_pd.core.protocol import (
    Describe,
    EngineDescription,
    GrantRefused,
    GrantRequest,
    Message,
    Problem,
    Revoke,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill.checksums import report_checksums
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout, RankMappings
from vllm_ascend_pd.prefill.rank import PrefillRank
from vllm_ascend_pd.prefill.regroup import StagingRing
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.transfer import Outcome, Transfer
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError
from vllm_ascend_pd.transport.wakeup import WakeupSocket

logger = logging.getLogger(__name__)

# Pause after a failed request for a description, which may fail at once.
_DESCRIBE_PAUSE_S = 0.1
# The most requests for descriptions in flight to one address: half of the replies that a listener keeps for a client
# that does not read (`DescriptionListener`).
_DESCRIBED_AT_ONCE = 4
# How often engines are forgotten, and connections put to rest.
_TIDY_S = 1.0
# An engine to which nothing was sent for this long is forgotten. It is described again at the next contact.
_FORGET_AFTER_S = 600.0


@dataclass
class DecodeEngine:
    """One decode engine. The control thread owns all of it except `users` and `used_at`."""

    # The address of its listener, which describes it.
    endpoint: str
    engine_id: str
    # What writes to it.
    sender: Sender
    # How its ranks' caches lie. None until it has described itself.
    layout: DecodeLayout | None = None
    # Transfers that wait for its description.
    waiting: list[Transfer] = field(default_factory=list)
    # Whether a request for its description is in flight.
    describing: bool = False
    # When it may be asked for its description again, on the monotonic clock.
    describe_at: float = 0.0
    # Why it will never answer again.
    gone: str | None = None
    # Addresses that were connected to for it.
    endpoints: set[str] = field(default_factory=set)
    # Tickets of it that were acquired and not yet released. The model's thread writes this and the next, the control
    # thread reads them, both under the lock of `ControlPlane`.
    users: int = 0
    # When a ticket of it was released last.
    used_at: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether something is expected from the engine."""
        return self.users > 0 or self.describing

    def is_over(self, now: float) -> bool:
        """Whether the engine can be forgotten.

        An engine that never described itself, or whose address another engine has by now, can be forgotten as soon as
        no transfer needs it.
        """
        if self.busy:
            return False
        return self.layout is None or self.gone is not None or now - self.used_at > _FORGET_AFTER_S


class ControlPlane:
    """The thread `pd-control` with the engines and transfers that it owns, and the senders' threads. It drives all
    transfers of a rank that are not over.

    Engines are known by the issuer that their tickets name.
    """

    def __init__(self, rank: PrefillRank, ring: StagingRing | None, mappings: RankMappings) -> None:
        """Starts the thread."""
        self._rank = rank
        self._ring = ring
        self._mappings = mappings
        self._why_misfit = partial(why_misfit, rank.info, rank.config, rank.caches.description, rank.engine.transport)
        self._timeout_s = rank.config.control_timeout_s
        self._hosts = rank.peers.hosts
        # The model's thread makes it, the control thread reads it. None until the scheduler names an address.
        self._wakeup: WakeupSocket | None = None
        # Read by the model's thread. None wakes it if it waits. The number of transfers bounds it, but for that.
        self.outcomes: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        # Guards the map below, which both threads change, and `users` and `used_at` of the engines in it.
        self._lock = threading.Lock()
        self._engines: dict[tuple[str, str], DecodeEngine] = {}
        # The control thread owns the next five. Transfers that are not over, by number.
        self._transfers: dict[int, Transfer] = {}
        # Numbers of ended transfers whose revocation is being answered now.
        self._disclaimed: set[int] = set()
        # By address: how many requests for descriptions are in flight.
        self._describing: Counter[str] = Counter()
        # Senders of engines that were forgotten, until they have ended.
        self._retired: list[Sender] = []
        # When to tidy up, on the monotonic clock.
        self._tidy_at = 0.0
        # The thread may tick before this constructor returns. Without an engine, a tick does not use the client.
        secret = rank.peers.secret
        self._client = SideChannelClient(self._on_revoked, self._on_tick, name="pd-control", secret=secret)

    # On the model's thread.

    def acquire(self, ticket: Ticket) -> Sender:
        """Returns the sender that writes to the engine that issued `ticket`. It takes tasks until `release`."""
        with self._lock:
            engine = self._engines.get(ticket.issuer)
            if engine is None:
                name = f"pd-sender-{ticket.remote_host}:{ticket.remote_port}"
                sender = Sender(name, self._rank, self._ring, self.writing_ended)
                engine = DecodeEngine(ticket.endpoint, ticket.remote_engine_id, sender, endpoints={ticket.endpoint})
                self._engines[ticket.issuer] = engine
            engine.users += 1
            return engine.sender

    def release(self, ticket: Ticket) -> None:
        """Gives the sender back that was acquired for `ticket`: it gets no more tasks for it."""
        with self._lock:
            engine = self._engines[ticket.issuer]
            engine.users -= 1
            engine.used_at = time.monotonic()

    def open(self, transfers: Sequence[Transfer]) -> None:
        """Begins to ask for grants for these transfers. A sender must have been acquired for each ticket."""
        self._client.call(partial(self._open, transfers))

    def wake_at(self, address: str) -> None:
        """A datagram to `address` wakes whoever waits for an outcome. Only the first address counts."""
        if self._wakeup is None:
            self._wakeup = wakeup = WakeupSocket(address)
            self._client.watch(wakeup.fileno(), partial(self._woken, wakeup))

    def close(self, timeout_s: float) -> None:
        """Ends the control thread, then the senders."""
        with ExitStack() as closing:  # all of them, even if one raises
            closing.callback(self._close_senders, timeout_s)
            if self._wakeup is not None:
                closing.callback(self._wakeup.close)
            closing.callback(self._client.close, timeout_s)

    def _close_senders(self, timeout_s: float) -> None:
        with ExitStack() as closing:  # the control thread, which retires senders, has ended
            for sender in [*self._retired, *(engine.sender for engine in self._all())]:
                closing.callback(sender.close, timeout_s)

    # On a sender's thread.

    def writing_ended(self, transfers: Sequence[Transfer]) -> None:
        """Says that no write of `transfers` follows. The sender does not touch them any more."""
        self._client.call(partial(self._writing_ended, transfers))

    # All that follows runs on the control thread.

    def _woken(self, wakeup: WakeupSocket) -> None:
        wakeup.clear()
        if self.outcomes.empty():
            self.outcomes.put(None)

    @owned
    def _open(self, transfers: Sequence[Transfer]) -> None:
        self._transfers.update((transfer.number, transfer) for transfer in transfers)
        with self._lock:
            engines = {transfer.ticket.issuer: self._engines[transfer.ticket.issuer] for transfer in transfers}
        for transfer in transfers:
            engines[transfer.ticket.issuer].waiting.append(transfer)
        for engine in engines.values():
            self._advance(engine)

    @owned
    def _on_tick(self, now: float) -> None:
        """Lets time pass for every engine and transfer, and forgets engines from time to time."""
        self._rank.running_time()
        for engine in self._all():
            if engine.waiting:
                self._advance(engine)
        if now >= self._tidy_at:
            self._tidy_at = now + _TIDY_S
            self._tidy(now)
        for transfer in list(self._transfers.values()):
            self._follow(transfer)

    def _all(self) -> list[DecodeEngine]:
        with self._lock:
            return list(self._engines.values())

    def _advance(self, engine: DecodeEngine) -> None:
        """Contacts the transfers that wait for the engine, or asks it for its description if that is missing."""
        if engine.gone is None and engine.layout is None:
            free = not engine.describing and self._describing[engine.endpoint] < _DESCRIBED_AT_ONCE
            if free and time.monotonic() >= engine.describe_at:
                engine.describing = True
                self._describing[engine.endpoint] += 1
                self._client.request(
                    engine.endpoint,
                    Describe(engine.engine_id),
                    self._timeout_s,
                    lambda answer: self._on_described(engine, answer),
                )
            return
        waiting, engine.waiting = engine.waiting, []
        for transfer in waiting:
            if engine.gone is not None or engine.layout is None:
                self._contact(engine, transfer, None, engine.gone)
            else:
                transfer.sender.engine_described(engine.layout)
                reason = why_foreign(transfer.ticket, engine.layout.description, engine.layout.smallest)
                self._contact(engine, transfer, engine.layout, reason)

    def _on_described(self, engine: DecodeEngine, answer: Message | SideChannelError) -> None:
        engine.describing = False
        self._describing[engine.endpoint] -= 1
        if isinstance(answer, SideChannelError):
            now = time.monotonic()
            engine.describe_at = now + _DESCRIBE_PAUSE_S
            late = [transfer for transfer in engine.waiting if now >= transfer.state.grant_deadline]
            engine.waiting = [transfer for transfer in engine.waiting if now < transfer.state.grant_deadline]
            for transfer in late:
                self._contact(
                    engine, transfer, None, f"decode engine {engine.engine_id} does not describe itself: {answer}"
                )
            return
        if isinstance(answer, EngineDescription) and (reason := why_unsound(answer, self._hosts)) is not None:
            where = [rank.control[:80] for rank in answer.ranks[:8]]
            logger.error("decode engine %s describes ranks at %s", engine.engine_id, where)
            answer = Problem(reason)  # nothing is sent to its ranks
        if isinstance(answer, EngineDescription):
            if answer.engine_id == engine.engine_id:
                self._take_over(engine)
                reason = self._why_misfit(answer)
            else:
                reason = f"engine {answer.engine_id} answers in place of {engine.engine_id}"
        else:
            reason = answer.reason if isinstance(answer, Problem) else f"unexpected answer {type(answer).__name__}"
        if reason is None:
            assert isinstance(answer, EngineDescription)
            engine.layout = DecodeLayout(answer)
        else:
            logger.error("decode engine %s at %s: %s: waiting requests fail", engine.engine_id, engine.endpoint, reason)
            layout = DecodeLayout(answer) if isinstance(answer, EngineDescription) else None
            waiting, engine.waiting = engine.waiting, []
            for transfer in waiting:
                self._contact(engine, transfer, layout, reason)
        for each in self._all():  # this engine's transfers can go on, and another engine can be asked
            if each.endpoint == engine.endpoint and each.waiting:
                self._advance(each)

    def _take_over(self, engine: DecodeEngine) -> None:
        """Marks engines as gone at whose address `engine` listens now: they ended before it was started."""
        others = [e for e in self._all() if e.endpoint == engine.endpoint and e is not engine and not e.gone]
        for other in others:
            other.gone = f"engine {other.engine_id} has ended: {engine.engine_id} is at its address now"
            logger.info("decode %s", other.gone)
            issuer = (other.endpoint, other.engine_id)
            for transfer in [each for each in self._transfers.values() if each.ticket.issuer == issuer]:
                if transfer not in other.waiting:
                    self._fail(transfer, other.gone, PushFailure.UNREACHABLE)
            self._advance(other)

    def _tidy(self, now: float) -> None:
        """Forgets engines that are no longer needed, and stops polling idle connections."""
        with self._lock:
            over = [key for key, engine in self._engines.items() if engine.is_over(now)]
            forgotten = [self._engines.pop(key) for key in over]
            in_use = {endpoint for engine in self._engines.values() for endpoint in engine.endpoints} if over else set()
            idle = [endpoint for engine in self._engines.values() if not engine.busy for endpoint in engine.endpoints]
        for endpoint in idle:
            self._client.rest(endpoint)
        self._retired = [sender for sender in self._retired if not sender.has_ended]
        for engine in forgotten:
            engine.sender.retire()
            self._retired.append(engine.sender)
            for endpoint in engine.endpoints - in_use:
                self._client.forget(endpoint)
                del self._describing[endpoint]
            if engine.layout is not None:
                self._rank.engine.forget({rank.session for rank in engine.layout.description.ranks})

    # Transfers.

    def _contact(
        self, engine: DecodeEngine, transfer: Transfer, layout: DecodeLayout | None, refused: str | None
    ) -> None:
        """Begins to ask the ranks of a decode engine for grants.

        layout: the engine's description; None if it did not describe itself.
        refused: why the engine gets nothing, None if it may. The ranks that the ticket would have been written to are
            told the reason, or one rank if that is not known: it fails the ticket, and decode's scheduler the request.
        """
        if refused is not None:
            self._fail(transfer, refused, PushFailure.UNREACHABLE if layout is None else PushFailure.UNFIT)
        destinations: dict[RankKey, Destination] = {}
        if layout is not None:
            try:
                destinations = self._mappings.destinations(layout, transfer.ticket)
            except (LookupError, ValueError) as error:
                reason = f"the ticket does not fit the decode engine's layout: {error!r}"
                self._fail(transfer, reason, PushFailure.UNFIT)
                first = min(layout.ranks)
                destinations = {first: Destination(layout.ranks[first], ())}
        engine.endpoints.update(destination.rank.control for destination in destinations.values())
        transfer.state.contacted(destinations)
        self._follow(transfer)

    def _fail(self, transfer: Transfer, reason: str, cause: PushFailure) -> None:
        """Fails the transfer. It ends as soon as the sender has no write of it in flight."""
        transfer.state.fail(reason, cause)
        transfer.sender.finish([transfer])

    def _on_revoked(self, endpoint: str, message: Message) -> None:
        """Handles a decode rank's revocation of a ticket. `endpoint`: where the message came from."""
        if not isinstance(message, Revoke) or message.writer != self._writer(number := message.writer.transfer):
            return
        transfer = self._transfers.get(number)
        if transfer is not None:
            # Only ranks that the ticket's own engine has described may revoke it.
            if endpoint in {d.rank.control for d in (transfer.state.destinations or {}).values()}:
                self._fail(transfer, f"decode took the ticket back: {message.reason}", PushFailure.REVOKED)
        elif number not in self._disclaimed:  # it is over: no byte of it is in flight
            self._disclaimed.add(number)
            self._client.request(
                endpoint,
                WriteReport(message.ticket_id, message.writer, "the transfer has ended", digest=message.digest),
                self._timeout_s,
                lambda answer: self._disclaimed.discard(number),
            )

    def _writer(self, number: int) -> WriterId:
        return WriterId(self._rank.info.engine_id, self._rank.info.pp_rank, self._rank.info.rank, number)

    @owned
    def _writing_ended(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._follow(transfer)

    def _follow(self, transfer: Transfer) -> None:
        """Takes the next steps of one transfer: ends the writing, asks for grants and renewals, notifies decode."""
        state = transfer.state
        is_writing = transfer.writing_ended and state.phase is Phase.WRITING
        if is_writing and state.finish(time.monotonic()) is not None:
            self._rank.observer.on(WritingEnded(transfer.ticket))
        is_notified_now, due = state.begin_notifying(self._rank.running_time()), state.due(time.monotonic())
        is_over = state.end()
        for key in due:
            self._ask(transfer, key)
        if is_notified_now:
            self._notify(transfer)
        if is_over:
            del self._transfers[transfer.number]
            self.outcomes.put((transfer, True))

    # Grants.

    def _ask(self, transfer: Transfer, key: RankKey) -> None:
        """Asks for a grant, or to renew it."""
        asked_at = time.monotonic()
        destination = transfer.state.asked(key, asked_at)
        ticket = transfer.ticket
        request = GrantRequest(
            ticket.ticket_id,
            transfer.digest,
            self._writer(transfer.number),
            self._rank.info.sharding,
            destination.covers,
            self._rank.engine.limits.settle_s,
            self._rank.info.draft,
            weights=transfer.weights.fingerprint,
        )
        answered = partial(self._on_grant, transfer, key, asked_at, destination.granted)
        self._client.request(destination.rank.control, request, self._timeout_s, answered)

    def _on_grant(
        self, transfer: Transfer, key: RankKey, asked_at: float, renewal: bool, answer: Message | SideChannelError
    ) -> None:
        self._rank.observer.on(GrantAnswered(transfer.ticket, key, asked_at, renewal, type(answer).__name__))
        if transfer.state.answered(key, asked_at, answer):
            transfer.sender.finish([transfer])
        elif isinstance(answer, GrantRefused):
            self._client.tick_within(GRANT_RETRY_S)
        if transfer.writing_ended:  # this answer may be all that it waited for
            self._follow(transfer)

    # The end.

    def _notify(self, transfer: Transfer) -> None:
        """Sends a round of reports. The next round follows when each request has an answer or has failed."""
        state = transfer.state
        pending = state.next_round()
        if not pending:
            if not transfer.is_notified:
                transfer.is_notified = True
                self._rank.observer.on(OutcomeReported(transfer.ticket, *state.delivered_bytes(), state.cause))
                if state.failure is not None:
                    logger.warning(
                        "request %s: KV was not delivered to decode engine %s at %s:%d: %s: its answer says so",
                        transfer.request_id,
                        transfer.ticket.remote_engine_id,
                        transfer.ticket.remote_host,
                        transfer.ticket.remote_port,
                        state.failure,
                    )
                    self.outcomes.put((transfer, False))
            self._follow(transfer)
            return
        writer, settle_s = self._writer(transfer.number), state.settle_s(self._rank.running_time())
        answers = 0

        def on_answer(key: RankKey, answer: Message | SideChannelError) -> None:
            nonlocal answers
            answers += 1
            if not isinstance(answer, SideChannelError):
                state.acked(key)
            if answers == len(pending):
                self._notify(transfer)

        checksums: Mapping[RankKey, bytes] = {}
        if state.failure is None and is_selected(self._rank.config.verified_share, transfer.ticket.ticket_id):
            form = self._rank.form_for(transfer.ticket)
            checksums = report_checksums(transfer.ticket, transfer.checksums, pending, form, transfer.grows)
        for key, destination in pending.items():
            report = WriteReport(
                transfer.ticket.ticket_id,
                writer,
                state.failure,
                num_bytes=destination.num_bytes,
                bytes_before_end=destination.early_bytes,
                settle_s=settle_s,
                digest=transfer.digest,
                cached_tokens=transfer.cached_tokens,
                checksums=checksums.get(key),
            )
            answered = partial(on_answer, key)
            self._client.request(destination.rank.control, report, self._timeout_s, answered)
