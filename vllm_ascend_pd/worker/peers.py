# SPDX-License-Identifier: Apache-2.0
"""The control plane of a prefill rank: describes decode engines, asks for grants, renews and reports.

All of it runs on the side channel's thread; other threads only start a transfer or end it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_ascend_pd.config import ConnectorConfig
from vllm_ascend_pd.core.protocol import (
    Describe,
    EngineDescription,
    Granted,
    GrantRequest,
    Message,
    Problem,
    Refused,
    Report,
    Revoke,
    Writer,
)
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.transport.side_channel import Client, SideChannelError
from vllm_ascend_pd.worker.identity import Identity
from vllm_ascend_pd.worker.peer import DecodeLayout
from vllm_ascend_pd.worker.sender import Sender
from vllm_ascend_pd.worker.transfer import Destination, RankKey, Transfer

logger = logging.getLogger(__name__)

# An engine nobody sent anything to for this long is forgotten; it is described again at next contact.
_FORGET_AFTER_S = 600.0
_GRANT_RETRY_S = 0.02
_REPORT_ATTEMPTS = 3


@dataclass
class Peer:
    """One decode engine. `layout` is None until it has answered."""

    endpoint: str
    engine_id: str
    sender: Sender
    layout: DecodeLayout | None = None
    waiting: list[Transfer] = field(default_factory=list)  # for its description
    describing: bool = False
    used_at: float = 0.0


class Peers:
    """`make_sender(name)`, `check(description)` (why an engine does not fit, or None) and `destinations(layout,
    transfer)` come from the producer; `revoked(transfer)` tells it to finish a transfer early."""

    def __init__(
        self,
        identity: Identity,
        config: ConnectorConfig,
        settle_s: float,
        make_sender: Callable[[str], Sender],
        check: Callable[[EngineDescription], str | None],
        destinations: Callable[[DecodeLayout, Transfer], dict[RankKey, Destination]],
        revoked: Callable[[Transfer], None],
        reported: Callable[[Transfer], None],
    ) -> None:
        self._config = config
        self._writer = Writer(identity.engine_id, identity.pp_rank, identity.tp_rank)
        self._tp = identity.tp
        self._settle_s = settle_s
        self._make_sender = make_sender
        self._check = check
        self._destinations = destinations
        self._revoked = revoked
        self._reported = reported
        self._lock = threading.Lock()  # guards the two maps; their values belong to the channel's thread
        self._peers: dict[tuple[str, str], Peer] = {}
        self._transfers: dict[str, Transfer] = {}
        self._settling: list[Transfer] = []  # written, but with bytes of an earlier attempt on their way
        self._client = Client(self._on_unasked, self._on_tick, name="pd-control")

    def sender_for(self, ticket: Ticket) -> Sender:
        """The sender that writes to the engine that issued `ticket`."""
        with self._lock:
            return self._peer(ticket).sender

    def open(self, transfer: Transfer) -> None:
        """Starts asking for grants."""
        with self._lock:
            self._transfers[transfer.ticket.ticket_id] = transfer
            peer = self._peer(transfer.ticket)
            peer.waiting.append(transfer)
        self._client.call(lambda: self._advance(peer))

    def _peer(self, ticket: Ticket) -> Peer:
        key = (ticket.endpoint, ticket.remote_engine_id)
        peer = self._peers.get(key)
        if peer is None:
            sender = self._make_sender(f"pd-sender-{ticket.remote_host}:{ticket.remote_port}")
            peer = self._peers[key] = Peer(ticket.endpoint, ticket.remote_engine_id, sender)
        peer.used_at = time.monotonic()
        return peer

    def report(self, transfer: Transfer) -> None:
        """Tells every decode rank that was asked for a grant how it ended; `reported` follows in any case."""
        self._client.call(lambda: self._report(transfer))

    def close(self, timeout_s: float) -> None:
        self._client.close(timeout_s)
        for peer in self._peers.values():
            peer.sender.close(timeout_s)

    # What follows runs on the channel's thread.

    def _advance(self, peer: Peer) -> None:
        if peer.layout is None:
            if not peer.describing:
                peer.describing = True
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
            self._contact(transfer, peer.layout, peer.layout.unfit(transfer.ticket))

    def _contact(self, transfer: Transfer, layout: DecodeLayout | None, refused: str | None) -> None:
        """The decode engine has described itself (`layout`), or will not. One that gets nothing is told why."""
        if refused is not None:
            self._refuse(transfer, refused)
        destinations: dict[RankKey, Destination] = {}
        if layout is not None and transfer.failure is None:
            try:
                destinations = self._destinations(layout, transfer)
            except (LookupError, ValueError) as error:
                self._refuse(transfer, f"the ticket does not fit the decode engine's layout: {error!r}")
        if layout is not None and transfer.failure is None:
            transfer.set_destinations(destinations)
            for key in destinations:
                self._ask(transfer, key)
        elif layout is not None:
            ranks = layout.description.ranks
            transfer.set_destinations({(rank.pp_rank, rank.tp_rank): Destination(rank, ()) for rank in ranks})
        transfer.contacted = True
        if transfer.finished:
            self._report(transfer)

    def _on_described(self, peer: Peer, answer: Message | SideChannelError) -> None:
        peer.describing = False
        if isinstance(answer, SideChannelError):
            self._describe_again(peer, str(answer))
            return
        reason: str | None
        if isinstance(answer, EngineDescription):
            if answer.engine_id == peer.engine_id:
                reason = self._check(answer)
            else:
                reason = f"engine {answer.engine_id} answers in place of {peer.engine_id}"
        else:
            reason = _reason(answer)
        if reason is None:
            assert isinstance(answer, EngineDescription)
            peer.layout = peer.sender.layout = DecodeLayout(answer)
            self._advance(peer)
            return
        logger.error("decode engine %s at %s: %s", peer.engine_id, peer.endpoint, reason)
        layout = DecodeLayout(answer) if isinstance(answer, EngineDescription) else None
        with self._lock:
            waiting, peer.waiting = peer.waiting, []
        for transfer in waiting:
            self._contact(transfer, layout, reason)

    def _describe_again(self, peer: Peer, reason: str) -> None:
        """No answer: asks on, for those whose time to be granted is not over."""
        now = time.monotonic()
        with self._lock:
            late = [transfer for transfer in peer.waiting if now >= transfer.grant_deadline]
            peer.waiting = [transfer for transfer in peer.waiting if now < transfer.grant_deadline]
        for transfer in late:
            self._contact(transfer, None, reason)
        if peer.waiting:
            self._advance(peer)

    def _refuse(self, transfer: Transfer, reason: str) -> None:
        transfer.fail(reason)
        self._revoked(transfer)

    def _ask(self, transfer: Transfer, key: RankKey) -> None:
        """Asks for a grant, or to renew it."""
        assert transfer.destinations is not None
        destination = transfer.destinations[key]
        destination.asking = True
        destination.asked_at = asked_at = time.monotonic()
        ticket = transfer.ticket
        request = GrantRequest(
            ticket.ticket_id,
            ticket.attempt,
            transfer.digest,
            self._writer,
            self._tp,
            destination.covers,
            self._settle_s,
        )
        self._client.request(
            destination.rank.control,
            request,
            self._config.control_timeout_s,
            lambda answer: self._on_grant(transfer, key, asked_at, answer),
        )

    def _on_grant(self, transfer: Transfer, key: RankKey, asked_at: float, answer: Message | SideChannelError) -> None:
        assert transfer.destinations is not None
        destination = transfer.destinations[key]
        destination.asking = False
        if isinstance(answer, Granted):
            destination.lease_s = answer.lease_s
            transfer.granted(key, asked_at + answer.lease_s)
        elif isinstance(answer, Refused) and not answer.retry and not transfer.reported:
            self._refuse(transfer, f"decode rank {key} refused: {answer.reason}")
        # Anything else may pass: the next tick asks again, until the grant deadline or the end of the lease.

    def _on_unasked(self, endpoint: str, message: Message) -> None:
        if isinstance(message, Revoke):
            with self._lock:
                transfer = self._transfers.get(message.ticket_id)
            if transfer is not None:
                self._refuse(transfer, f"decode took the ticket back: {message.reason}")

    def _on_tick(self, now: float) -> None:
        with self._lock:
            transfers = list(self._transfers.values())
            idle = [key for key, peer in self._peers.items() if now - peer.used_at > _FORGET_AFTER_S]
        for transfer in [t for t in self._settling if t.settled_at <= now]:
            self._settling.remove(transfer)
            self._report(transfer)
        for transfer in transfers:
            for key, destination in (transfer.destinations or {}).items():
                if destination.asking or transfer.failure is not None or transfer.reporting:
                    continue
                pause = destination.lease_s / 3 if destination.granted else _GRANT_RETRY_S
                if now - destination.asked_at >= pause:
                    self._ask(transfer, key)
        for peer_key in idle:
            self._forget(peer_key, {(t.ticket.endpoint, t.ticket.remote_engine_id) for t in transfers})

    def _forget(self, key: tuple[str, str], in_use: set[tuple[str, str]]) -> None:
        if key in in_use:
            return
        with self._lock:
            peer = self._peers.pop(key)
        peer.sender.close(0.0)
        if peer.layout is not None:
            for rank in peer.layout.description.ranks:
                self._client.forget(rank.control)
        self._client.forget(peer.endpoint)

    def _report(self, transfer: Transfer) -> None:
        """A failure is told at once, success only when no byte can arrive any more: decode goes on with the blocks."""
        if not transfer.contacted or transfer.reporting:
            return  # `_contact` comes back to it; or it did while this call was on its way
        settle_s = max(0.0, transfer.settled_at - time.monotonic())
        if settle_s > 0 and transfer.failure is None:
            self._settling.append(transfer)
            return
        transfer.reporting = True
        self._tell(transfer, settle_s)

    def _tell(self, transfer: Transfer, settle_s: float, attempt: int = 1) -> None:
        ticket = transfer.ticket
        report = Report(
            ticket.ticket_id,
            ticket.attempt,
            self._writer,
            transfer.failure,
            transfer.num_bytes,
            transfer.bytes_at_end,
            settle_s,
        )
        open_ = [d for d in (transfer.destinations or {}).values() if not d.told]
        if not open_ or attempt > _REPORT_ATTEMPTS:
            with self._lock:
                self._transfers.pop(ticket.ticket_id, None)
            self._reported(transfer)
            return
        answers = 0

        def on_answer(destination: Destination, answer: Message | SideChannelError) -> None:
            nonlocal answers
            answers += 1
            destination.told = not isinstance(answer, SideChannelError)
            if answers == len(open_):
                self._tell(transfer, settle_s, attempt + 1)

        for destination in open_:
            self._client.request(
                destination.rank.control,
                report,
                self._config.control_timeout_s,
                lambda answer, destination=destination: on_answer(destination, answer),  # type: ignore[misc]
            )


def _reason(answer: Message) -> str:
    return answer.reason if isinstance(answer, Problem) else f"unexpected answer {type(answer).__name__}"
