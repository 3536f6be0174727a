# SPDX-License-Identifier: Apache-2.0
"""The decode engines that a prefill rank is in contact with: how they are described, and when they are forgotten.

The model's thread acquires the sender for a ticket, and releases it. All else runs on the control thread.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from vllm_ascend_pd.core.compatibility import unsound
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.protocol import Describe, EngineDescription, Message, Problem
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.fit import FitCheck
from vllm_ascend_pd.prefill.peer_state import Peer
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.prefill.transfer_control import TransferControl
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError

logger = logging.getLogger(__name__)

# Pause after a failed request for a description, which may fail at once.
_DESCRIBE_PAUSE_S = 0.1
# The most requests for descriptions in flight to one address: half of the replies that a listener keeps for a client
# that does not read (`DescriptionListener`).
_DESCRIBED_AT_ONCE = 4
# How often engines are forgotten, and connections put to rest.
_TIDY_S = 1.0


class Peers:
    """The decode engines that a prefill rank is in contact with, by the issuer that their tickets name."""

    def __init__(
        self,
        client: SideChannelClient,
        transfers: TransferControl,
        engine: TransferEngine,
        make_sender: Callable[[str], Sender],
        fit: FitCheck,
        hosts: HostList,
        control_timeout_s: float,
    ) -> None:
        """`make_sender(name)` starts a sender.

        hosts: which hosts decode engines may be at.
        """
        self._client = client
        self._transfers = transfers
        self._engine = engine
        self._make_sender = make_sender
        self._fit = fit
        self._hosts = hosts
        self._timeout_s = control_timeout_s
        # Guards the map below, which both threads change, and `sender`, `users` and `used_at` of the peers in it.
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], Peer] = {}
        # The control thread owns the rest.
        # By address: how many requests for descriptions are in flight.
        self._describing: Counter[str] = Counter()
        # Senders of engines that were forgotten, until they have ended.
        self._retired: list[Sender] = []
        # When to tidy up, on the monotonic clock.
        self._tidy_at = 0.0

    # On the model's thread.

    def acquire(self, ticket: Ticket) -> Sender:
        """Returns the sender that writes to the engine that issued `ticket`. It takes tasks until `release`."""
        with self._lock:
            peer = self._peers.get(ticket.issuer)
            if peer is None:
                peer = Peer(ticket.endpoint, ticket.remote_engine_id, endpoints={ticket.endpoint})
                self._peers[ticket.issuer] = peer
            if peer.sender is None:
                peer.sender = self._make_sender(f"pd-sender-{ticket.remote_host}:{ticket.remote_port}")
            peer.users += 1
            return peer.sender

    def release(self, ticket: Ticket) -> None:
        """Gives the sender back that was acquired for `ticket`: it gets no more tasks for it."""
        with self._lock:
            peer = self._peers[ticket.issuer]
            peer.users -= 1
            peer.used_at = time.monotonic()

    # On the control thread.

    @owned
    def open(self, transfers: Sequence[Transfer]) -> None:
        """Begins to ask for grants for these transfers. A sender must have been acquired for each ticket."""
        with self._lock:
            peers = {transfer.ticket.issuer: self._peers[transfer.ticket.issuer] for transfer in transfers}
        for transfer in transfers:
            peers[transfer.ticket.issuer].waiting.append(transfer)
        for peer in peers.values():
            self._advance(peer)

    @owned
    def tick(self, now: float) -> None:
        """Contacts transfers that wait, and forgets engines from time to time."""
        for peer in self._all():
            if peer.waiting:
                self._advance(peer)
        if now >= self._tidy_at:
            self._tidy_at = now + _TIDY_S
            self._tidy(now)

    def _all(self) -> list[Peer]:
        with self._lock:
            return list(self._peers.values())

    def _advance(self, peer: Peer) -> None:
        """Contacts the transfers that wait for the peer, or asks the peer for its description if that is missing."""
        if peer.gone is None and peer.layout is None:
            free = not peer.describing and self._describing[peer.endpoint] < _DESCRIBED_AT_ONCE
            if free and time.monotonic() >= peer.describe_at:
                peer.describing = True
                self._describing[peer.endpoint] += 1
                self._client.request(
                    peer.endpoint,
                    Describe(peer.engine_id),
                    self._timeout_s,
                    lambda answer: self._on_described(peer, answer),
                )
            return
        waiting, peer.waiting = peer.waiting, []
        for transfer in waiting:
            if peer.gone is not None or peer.layout is None:
                self._transfers.contact(transfer, None, peer.gone)
            else:
                transfer.sender.engine_described(peer.layout)
                self._transfers.contact(transfer, peer.layout, peer.layout.unfit(transfer.ticket))

    def _on_described(self, peer: Peer, answer: Message | SideChannelError) -> None:
        peer.describing = False
        self._describing[peer.endpoint] -= 1
        if isinstance(answer, SideChannelError):
            self._describe_again(peer, f"decode engine {peer.engine_id} does not describe itself: {answer}")
            return
        if isinstance(answer, EngineDescription) and (reason := unsound(answer, self._hosts)) is not None:
            where = [rank.control[:80] for rank in answer.ranks[:8]]
            logger.error("decode engine %s describes ranks at %s", peer.engine_id, where)
            answer = Problem(reason)  # nothing is sent to its ranks
        if isinstance(answer, EngineDescription):
            peer.endpoints.update(rank.control for rank in answer.ranks)
            if answer.engine_id == peer.engine_id:
                self._take_over(peer)
                reason = self._fit.misfit(answer)
            else:
                reason = f"engine {answer.engine_id} answers in place of {peer.engine_id}"
        else:
            reason = answer.reason if isinstance(answer, Problem) else f"unexpected answer {type(answer).__name__}"
        if reason is None:
            assert isinstance(answer, EngineDescription)
            peer.layout = DecodeLayout(answer)
        else:
            logger.error("decode engine %s at %s: %s: waiting requests fail", peer.engine_id, peer.endpoint, reason)
            layout = DecodeLayout(answer) if isinstance(answer, EngineDescription) else None
            waiting, peer.waiting = peer.waiting, []
            for transfer in waiting:
                self._transfers.contact(transfer, layout, reason)
        for each in self._all():  # this engine's transfers can go on, and another engine can be asked
            if each.endpoint == peer.endpoint and each.waiting:
                self._advance(each)

    def _take_over(self, peer: Peer) -> None:
        """Marks engines as gone at whose address `peer` listens now: they ended before it was started."""
        others = [p for p in self._all() if p.endpoint == peer.endpoint and p is not peer and not p.gone]
        for other in others:
            other.gone = f"engine {other.engine_id} has ended: {peer.engine_id} is at its address now"
            logger.info("decode %s", other.gone)
            for transfer in self._transfers.issued_by((other.endpoint, other.engine_id)):
                if transfer not in other.waiting:
                    self._transfers.fail(transfer, other.gone, PushFailure.UNREACHABLE)
            self._advance(other)

    def _describe_again(self, peer: Peer, reason: str) -> None:
        """Schedules another request for a description. Fails the transfers whose grant deadline has passed."""
        now = time.monotonic()
        peer.describe_at = now + _DESCRIBE_PAUSE_S
        late = [transfer for transfer in peer.waiting if now >= transfer.state.grant_deadline]
        peer.waiting = [transfer for transfer in peer.waiting if now < transfer.state.grant_deadline]
        for transfer in late:
            self._transfers.contact(transfer, None, reason)

    def _tidy(self, now: float) -> None:
        """Forgets engines that are no longer needed, and stops polling idle connections."""
        with self._lock:
            over = [key for key, peer in self._peers.items() if peer.is_over(now)]
            forgotten = [self._peers.pop(key) for key in over]
            in_use = {endpoint for peer in self._peers.values() for endpoint in peer.endpoints} if over else set()
            idle = [endpoint for peer in self._peers.values() if not peer.busy for endpoint in peer.endpoints]
        for endpoint in idle:
            self._client.rest(endpoint)
        self._retired = [sender for sender in self._retired if not sender.ended]
        for peer in forgotten:
            if peer.sender is not None:
                peer.sender.retire()
                self._retired.append(peer.sender)
            for endpoint in peer.endpoints - in_use:
                self._client.forget(endpoint)
                del self._describing[endpoint]
            if peer.layout is not None:
                self._engine.forget({rank.session for rank in peer.layout.description.ranks})

    def close(self, timeout_s: float) -> None:
        """Stops the senders. The control thread must have ended."""
        with ExitStack() as closing:
            for sender in [*self._retired, *(peer.sender for peer in self._all() if peer.sender is not None)]:
                closing.callback(sender.close, timeout_s)
