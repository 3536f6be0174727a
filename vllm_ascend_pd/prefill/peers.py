# SPDX-License-Identifier: Apache-2.0
"""The control plane of a prefill rank: describes decode engines, asks for grants, renews and reports.

All of it runs on the side channel's thread; other threads only start a transfer or end it.
"""

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.description import unsound
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.hosts import decode_hosts
from vllm_ascend_pd.core.observer import PrefillObserver
from vllm_ascend_pd.core.prefill_ticket import GRANT_RETRY_S, Destination, RankKey
from vllm_ascend_pd.core.protocol import (
    ClockReading,
    Describe,
    EngineDescription,
    Granted,
    GrantRefused,
    GrantRequest,
    Message,
    Problem,
    ReadClock,
    Revoke,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.rank_info import RankInfo
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.peer_state import Peer
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.transport.curve import load_keys
from vllm_ascend_pd.transport.own_networks import own_networks
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError

logger = logging.getLogger(__name__)

# Between an attempt to have an engine describe itself that failed and the next: it may fail at once.
_DESCRIBE_PAUSE_S = 0.1
# Asked at once at one address: half of the answers that a listener keeps unread (`DescriptionListener`).
_DESCRIBED_AT_ONCE = 4
# How often it is looked which engines can be forgotten, and whose connections can rest.
_TIDY_S = 1.0


class Peers:
    """`make_sender(name)`, `check(description)` (why an engine does not fit, or None) and `destinations(layout,
    transfer)` come from the producer. `revoked(transfer)` tells it to finish a transfer early, `told(transfer)` that
    decode knows how it ended or cannot be told, `ended(transfer)` that nothing reads its blocks any more;
    `forget_sessions` is the transfer engine's `forget`."""

    def __init__(
        self,
        identity: RankInfo,
        config: ConnectorConfig,
        settle_s: float,
        running_time: RunningTime,
        make_sender: Callable[[str], Sender],
        check: Callable[[EngineDescription], str | None],
        destinations: Callable[[DecodeLayout, Transfer], dict[RankKey, Destination]],
        revoked: Callable[[Transfer], None],
        told: Callable[[Transfer], None],
        ended: Callable[[Transfer], None],
        forget_sessions: Callable[[Collection[str]], None],
        observer: PrefillObserver,
    ) -> None:
        self._config = config
        self._identity = identity
        self._settle_s = settle_s
        self._running_time = running_time
        self._make_sender = make_sender
        self._check = check
        self._destinations = destinations
        self._revoked = revoked
        self._told = told
        self._ended = ended
        self._forget_sessions = forget_sessions
        self._observer = observer
        signed = config.ticket_secret_file is not None
        self._hosts = decode_hosts(config.decode_allowlist, identity.host, signed, own_networks())
        # Guards the two maps, and `waiting` and `users` of peers; all else in them belongs to the channel's thread.
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], Peer] = {}  # by tickets' issuer
        self._describing: Counter[str] = Counter()  # how many of an endpoint's peers
        self._transfers: dict[int, Transfer] = {}  # by number
        self._disclaimed: set[int] = set()  # numbers decode is just being told that we know no such transfer
        self._retired: list[Sender] = []  # of engines forgotten, until they have ended
        self._tidy_at = 0.0
        keys = load_keys(config.side_channel_key_file)
        self._client = SideChannelClient(self._on_unasked, self._on_tick, name="pd-control", keys=keys)

    def acquire(self, ticket: Ticket) -> Sender:
        """The sender that writes to the engine that issued `ticket`; it takes tasks until `release`."""
        with self._lock:
            peer = self._peers.get(ticket.issuer)
            if peer is None:
                sender = self._make_sender(f"pd-sender-{ticket.remote_host}:{ticket.remote_port}")
                peer = Peer(ticket.endpoint, ticket.remote_engine_id, sender, endpoints={ticket.endpoint})
                self._peers[ticket.issuer] = peer
            peer.users += 1
            return peer.sender

    def release(self, ticket: Ticket) -> None:
        """Nothing more will be put for an acquired `ticket`."""
        with self._lock:
            peer = self._peers[ticket.issuer]
            peer.users -= 1
            peer.used_at = time.monotonic()

    def open(self, transfers: Sequence[Transfer]) -> None:
        """Starts asking for grants. The tickets must have been acquired."""
        asked: dict[tuple[str, str], Peer] = {}
        with self._lock:
            for transfer in transfers:
                self._transfers[transfer.number] = transfer
                issuer = transfer.ticket.issuer
                asked[issuer] = peer = self._peers[issuer]
                peer.waiting.append(transfer)
        for peer in asked.values():
            self._client.call(functools.partial(self._advance, peer))

    def report(self, transfers: Sequence[Transfer]) -> None:
        """Tells every decode rank that was asked for a grant how they ended; `told` and `ended` follow in any case."""

        def follow() -> None:
            for transfer in transfers:
                self._follow(transfer)

        if transfers:
            self._client.call(follow)

    def close(self, timeout_s: float) -> None:
        self._client.close(timeout_s)
        for sender in [*self._retired, *(peer.sender for peer in self._peers.values())]:
            sender.close(timeout_s)

    # What follows runs on the channel's thread.

    def _advance(self, peer: Peer) -> None:
        if peer.gone is None and peer.layout is None:
            free = not peer.describing and self._describing[peer.endpoint] < _DESCRIBED_AT_ONCE
            if free and time.monotonic() >= peer.describe_at:
                peer.describing = True
                self._describing[peer.endpoint] += 1
                self._client.request(
                    peer.endpoint,
                    Describe(peer.engine_id),
                    self._config.control_timeout_s,
                    lambda answer: self._on_described(peer, answer),
                )
            return
        with self._lock:
            waiting, peer.waiting = peer.waiting, []
        for transfer in waiting:
            if peer.gone is not None or peer.layout is None:
                self._contact(transfer, None, peer.gone)
            else:
                self._contact(transfer, peer.layout, peer.layout.unfit(transfer.ticket))

    def _contact(self, transfer: Transfer, layout: DecodeLayout | None, refused: str | None) -> None:
        """The decode engine has described itself (`layout`), or will not. One that gets nothing is told why."""
        if refused is not None:
            self._refuse(transfer, refused, PushFailure.UNREACHABLE if layout is None else PushFailure.UNFIT)
        destinations: dict[RankKey, Destination] = {}
        if layout is not None and transfer.failure is None:
            try:
                destinations = self._destinations(layout, transfer)
            except (LookupError, ValueError) as error:
                reason = f"the ticket does not fit the decode engine's layout: {error!r}"
                self._refuse(transfer, reason, PushFailure.UNFIT)
        if layout is not None and transfer.failure is None:
            contacted = destinations
        else:
            ranks = () if layout is None else layout.description.ranks
            contacted = {(rank.pp_rank, rank.tp_rank): Destination(rank, ()) for rank in ranks}
        with transfer.changing() as state:
            state.contacted(contacted)
        self._follow(transfer)

    def _on_described(self, peer: Peer, answer: Message | SideChannelError) -> None:
        peer.describing = False
        self._describing[peer.endpoint] -= 1
        if isinstance(answer, SideChannelError):
            self._describe_again(peer, f"decode engine {peer.engine_id} does not describe itself: {answer}")
            return
        if isinstance(answer, EngineDescription) and (reason := unsound(answer, self._hosts)) is not None:
            where = [rank.control[:80] for rank in answer.ranks[:8]]
            logger.error("decode engine %s describes ranks at %s", peer.engine_id, where)
            answer = Problem(reason)  # its ranks are not even told
        if isinstance(answer, EngineDescription):
            peer.endpoints.update(rank.control for rank in answer.ranks)
            if answer.engine_id == peer.engine_id:
                self._take_over(peer)
                reason = self._check(answer)
            else:
                reason = f"engine {answer.engine_id} answers in place of {peer.engine_id}"
        else:
            reason = answer.reason if isinstance(answer, Problem) else f"unexpected answer {type(answer).__name__}"
        if reason is None:
            assert isinstance(answer, EngineDescription)
            peer.layout = DecodeLayout(answer)
            peer.sender.engine_described(peer.layout)
        else:
            logger.error("decode engine %s at %s: %s: waiting requests fail", peer.engine_id, peer.endpoint, reason)
            layout = DecodeLayout(answer) if isinstance(answer, EngineDescription) else None
            with self._lock:
                waiting, peer.waiting = peer.waiting, []
            for transfer in waiting:
                self._contact(transfer, layout, reason)
        with self._lock:
            there = [each for each in self._peers.values() if each.endpoint == peer.endpoint and each.waiting]
        for each in there:  # this one's transfers, and others' turn to be described
            self._advance(each)

    def _take_over(self, peer: Peer) -> None:
        """`peer` listens where others did: it was started after they had ended."""
        with self._lock:
            others = [p for p in self._peers.values() if p.endpoint == peer.endpoint and p is not peer and not p.gone]
            transfers = list(self._transfers.values())
        for other in others:
            other.gone = f"engine {other.engine_id} has ended: {peer.engine_id} is at its address now"
            logger.info("decode %s", other.gone)
            for transfer in transfers:
                if transfer.ticket.issuer == (other.endpoint, other.engine_id) and transfer not in other.waiting:
                    self._refuse(transfer, other.gone, PushFailure.UNREACHABLE)
            self._advance(other)

    def _describe_again(self, peer: Peer, reason: str) -> None:
        """No answer: asks on, soon, for those whose time to be granted is not over."""
        now = time.monotonic()
        peer.describe_at = now + _DESCRIBE_PAUSE_S
        with self._lock:
            late = [transfer for transfer in peer.waiting if now >= transfer.state.grant_deadline]
            peer.waiting = [transfer for transfer in peer.waiting if now < transfer.state.grant_deadline]
        for transfer in late:
            self._contact(transfer, None, reason)

    def _refuse(self, transfer: Transfer, reason: str, cause: PushFailure) -> None:
        transfer.fail(reason, cause)
        self._revoked(transfer)

    def _ask(self, transfer: Transfer, key: RankKey) -> None:
        """Asks for a grant, or to renew it."""
        asked_at = time.monotonic()
        with transfer.changing() as state:
            destination = state.asked(key, asked_at)
        ticket = transfer.ticket
        request = GrantRequest(
            ticket.ticket_id,
            ticket.attempt,
            transfer.digest,
            self._writer(transfer.number),
            self._identity.sharding,
            destination.covers,
            self._settle_s,
            self._identity.draft,
            weights=transfer.weights.fingerprint,
        )
        answered = functools.partial(self._on_grant, transfer, key, asked_at, destination.granted)
        self._client.request(destination.rank.control, request, self._config.control_timeout_s, answered)

    def _on_grant(
        self, transfer: Transfer, key: RankKey, asked_at: float, renewal: bool, answer: Message | SideChannelError
    ) -> None:
        self._observer.grant_answered(transfer.ticket, key, asked_at, renewal, type(answer).__name__)
        if self._observer.wants_clock and isinstance(answer, Granted):
            self._read_clock(transfer, key)
        with transfer.changing() as state:
            refused = state.answered(key, asked_at, answer)
        if refused:
            self._revoked(transfer)
        elif isinstance(answer, GrantRefused):
            self._client.tick_within(GRANT_RETRY_S)

    def _read_clock(self, transfer: Transfer, key: RankKey) -> None:
        """Asks a decode rank what time it is. Engines that do not know the question answer with a `Problem`."""
        rank = (transfer.state.destinations or {})[key].rank
        asked_at = time.monotonic()

        def on_answer(answer: Message | SideChannelError) -> None:
            if isinstance(answer, ClockReading):
                self._observer.clock_read(asked_at, answer)

        question = ReadClock(transfer.ticket.ticket_id, transfer.digest)
        self._client.request(rank.control, question, self._config.control_timeout_s, on_answer)

    def _on_unasked(self, endpoint: str, message: Message) -> None:
        if not isinstance(message, Revoke) or message.writer != self._writer(message.writer.transfer):
            return
        with self._lock:
            transfer = self._transfers.get(message.writer.transfer)
        if transfer is None:
            self._disclaim(endpoint, message)
        elif endpoint in {d.rank.control for d in (transfer.state.destinations or {}).values()}:
            # Only a rank that the ticket's own engine has described may take it back.
            self._refuse(transfer, f"decode took the ticket back: {message.reason}", PushFailure.REVOKED)

    def _disclaim(self, endpoint: str, revoke: Revoke) -> None:
        """Answers the revocation of a transfer that has ended: it left the map when nothing of it was on its way any
        more."""
        number = revoke.writer.transfer
        if number in self._disclaimed:
            return
        self._disclaimed.add(number)
        self._client.request(
            endpoint,
            WriteReport(
                revoke.ticket_id, revoke.attempt, revoke.writer, "the transfer has ended", digest=revoke.digest
            ),
            self._config.control_timeout_s,
            lambda answer: self._disclaimed.discard(number),
        )

    def _writer(self, number: int) -> WriterId:
        return WriterId(self._identity.engine_id, self._identity.pp_rank, self._identity.rank, number)

    def _on_tick(self, now: float) -> None:
        self._running_time()
        with self._lock:
            transfers = list(self._transfers.values())
            unknown = [peer for peer in self._peers.values() if peer.waiting]
        for peer in unknown:
            self._advance(peer)
        for transfer in transfers:
            self._follow(transfer)
        if now >= self._tidy_at:
            self._tidy_at = now + _TIDY_S
            self._tidy(now)

    def _tidy(self, now: float) -> None:
        with self._lock:
            over = [key for key, peer in self._peers.items() if peer.is_over(now)]
            forgotten = [self._peers.pop(key) for key in over]
            in_use = {endpoint for peer in self._peers.values() for endpoint in peer.endpoints} if over else set()
            idle = [endpoint for peer in self._peers.values() if not peer.busy for endpoint in peer.endpoints]
        for endpoint in idle:
            self._client.rest(endpoint)
        self._retired = [sender for sender in self._retired if not sender.ended]
        for peer in forgotten:
            peer.sender.retire()
            self._retired.append(peer.sender)
            for endpoint in peer.endpoints - in_use:
                self._client.forget(endpoint)
                del self._describing[endpoint]
            if peer.layout is not None:
                self._forget_sessions({rank.session for rank in peer.layout.description.ranks})

    def _follow(self, transfer: Transfer) -> None:
        """Does what is due: asks for grants and renewals, tells decode how it went, ends."""
        with transfer.changing() as state:
            tell, due, end = state.tell(self._running_time()), state.due(time.monotonic()), state.end()
        for key in due:
            self._ask(transfer, key)
        if tell:
            self._tell(transfer)
        if end:
            with self._lock:
                self._transfers.pop(transfer.number, None)
            self._ended(transfer)

    def _tell(self, transfer: Transfer) -> None:
        """A round of telling; the next follows when all have answered or will not."""
        with transfer.changing() as state:
            untold = state.next_round()
            settle_s = state.settle_s(self._running_time())
            reason = state.failure
        if not untold:
            if not transfer.told:
                transfer.told = True
                self._told(transfer)
            self._follow(transfer)
            return
        writer = self._writer(transfer.number)
        answers = 0

        def on_answer(key: RankKey, answer: Message | SideChannelError) -> None:
            nonlocal answers
            answers += 1
            if not isinstance(answer, SideChannelError):
                with transfer.changing() as state:
                    state.told(key)
            if answers == len(untold):
                self._tell(transfer)

        for key, destination in untold.items():
            answered = functools.partial(on_answer, key)
            report = transfer.report(writer, key, reason, settle_s)
            self._client.request(destination.rank.control, report, self._config.control_timeout_s, answered)
