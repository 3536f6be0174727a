# SPDX-License-Identifier: Apache-2.0
"""All transfers of a prefill rank, from their tickets until vLLM may free their blocks.

Three threads meet here: the model's thread opens and releases transfers, senders say that no write of a transfer
follows, and the control thread says that decode has been told and that nothing reads the blocks any more. `_changed`
guards what they share, and is never held while anything waits.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.failure import PushFailure
from vllm_ascend_pd.core.observer import PrefillObserver, PrefillStatus
from vllm_ascend_pd.core.prefill_ticket import Destination, PrefillTicket, RankKey
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.rank_info import RankInfo
from vllm_ascend_pd.core.running_time import RunningTime
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.peers import Peers
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.staging import StagingRing
from vllm_ascend_pd.prefill.step_transfer import StepTransfer
from vllm_ascend_pd.prefill.transfer import Transfer, Withdrawals
from vllm_ascend_pd.transport.engine import TransferEngine

logger = logging.getLogger(__name__)


class Transfers:
    """The transfers by request id, with the senders that write them and the peers that grant them."""

    def __init__(
        self,
        identity: RankInfo,
        config: ConnectorConfig,
        engine: TransferEngine,
        ring: StagingRing[StepTransfer] | None,
        running_time: RunningTime,
        loaded: LoadedWeights,
        observer: PrefillObserver,
        check: Callable[[EngineDescription], str | None],
        destinations: Callable[[DecodeLayout, Transfer], dict[RankKey, Destination]],
    ) -> None:
        """`check` and `destinations` are as in `Peers`."""
        self._config = config
        self._loaded = loaded
        self._observer = observer
        # The model's thread changes both; others take copies.
        self._by_request: dict[str, Transfer] = {}
        self._senders: dict[str, Sender] = {}  # by ticket id
        # Those that had not all grants when last asked. The model's thread's.
        self._ungranted: list[Transfer] = []
        # Shared by all transfers: see `LeaseCheck`.
        self._withdrawals = Withdrawals()
        # Guards the following, and `finishing`, `ended` and `released` of transfers.
        self._changed = threading.Condition()
        # Request ids whose blocks may be freed.
        self._done: set[str] = set()
        # By request id: why its KV was not delivered. Not yet reported to the scheduler.
        self._failed: dict[str, str] = {}
        make_sender = partial(
            Sender,
            engine=engine,
            ring=ring,
            finished=self._on_finished,
            running_time=running_time,
            observer=observer,
            queue_size=config.push_queue_size,
            ready_timeout_s=config.collective_timeout_s + config.write_timeout_s,
            grant_wait_s=config.control_timeout_s,
        )
        self.peers = Peers(
            identity,
            config,
            engine.limits.settle_s,
            running_time,
            make_sender=make_sender,
            check=check,
            destinations=destinations,
            revoked=self.finish,
            told=self._on_told,
            ended=self._on_ended,
            forget_sessions=engine.forget,
            observer=observer,
        )

    def __getitem__(self, request_id: str) -> Transfer:
        return self._by_request[request_id]

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._by_request.values()))

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: str) -> Transfer | None:
        return self._by_request.get(request_id)

    def sender_of(self, transfer: Transfer) -> Sender:
        return self._senders[transfer.ticket.ticket_id]

    # On the model's thread.

    @owned
    def open(self, tickets: dict[str, Ticket], cached_tokens: dict[str, int]) -> list[Transfer]:
        """Opens a transfer for each ticket, by request id, and starts asking for grants."""
        opened, now = [], time.monotonic()
        for request_id, ticket in tickets.items():
            sender = self.peers.acquire(ticket)
            transfer = Transfer(
                request_id,
                ticket,
                PrefillTicket(now + self._config.grant_timeout_s, patience_ends=now + self._config.transfer_timeout_s),
                self._withdrawals,
                sender.grant_wait,
                now + self._config.grant_timeout_s,
                cached_tokens.get(request_id, 0),
                self._loaded.current,
            )
            self._by_request[request_id] = transfer
            self._senders[ticket.ticket_id] = sender
            sender.add(transfer)
            opened.append(transfer)
        if opened:
            self.peers.open(opened)
            self._ungranted = [*self._still_ungranted(), *opened]
        return opened

    @owned
    def release(self, request_id: str, aborted: str | None) -> None:
        """vLLM is done with the request, or has `aborted` it for that reason."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return
        if aborted is not None:
            transfer.fail(aborted, PushFailure.ABORTED)
        self.finish(transfer)
        with self._changed:
            transfer.released = True
            if transfer.ended:
                self._done.add(request_id)

    @owned
    def take_done(self, wait_s: float) -> set[str]:
        """Returns the requests whose blocks vLLM may free: it is done with them and no push reads them any more. Waits
        for one at most `wait_s`. Raises RuntimeError if a sender has ended by a bug."""
        with self._changed:
            if wait_s and self._by_request:
                self._changed.wait_for(lambda: bool(self._done), wait_s)
            done, self._done = self._done, set()
        for sender in self._senders_in_use():
            sender.check()
        for request_id in done:
            transfer = self._by_request.pop(request_id)
            self._senders.pop(transfer.ticket.ticket_id).remove(transfer)
            self.peers.release(transfer.ticket)
        return done

    def take_failed(self) -> dict[str, str]:
        """Returns by request id why KV was not delivered, as far as that is new."""
        with self._changed:
            failed, self._failed = self._failed, {}
        return failed

    def status(self, restart_needed: bool) -> PrefillStatus:
        """How the rank is now, with `restart_needed` as the caller says."""
        self._ungranted = self._still_ungranted()
        queued = sum(sender.queued for sender in self._senders_in_use())
        return PrefillStatus(queued, len(self._ungranted), restart_needed)

    def close(self, timeout_s: float) -> None:
        for transfer in self:  # so that nobody waits for its grants any more
            transfer.fail("prefill shuts down", PushFailure.ABORTED)
        self.peers.close(timeout_s)

    def _still_ungranted(self) -> list[Transfer]:
        """Only those that waited when last asked: a transfer that has all grants keeps them."""
        return [transfer for transfer in self._ungranted if transfer.state.waits_for_grant]

    def _senders_in_use(self) -> set[Sender]:
        return set(self._senders.values())

    # On any thread.

    def finish(self, *transfers: Transfer) -> None:
        """Nothing more will be pushed for them. May be called any number of times."""
        of: dict[Sender, list[Transfer]] = {}
        with self._changed:
            for transfer in transfers:
                if not transfer.finishing:
                    transfer.finishing = True
                    of.setdefault(self.sender_of(transfer), []).append(transfer)
        for sender, finishing in of.items():
            sender.finish(finishing)

    def lose(self, transfers: Iterable[Transfer], reason: str, cause: PushFailure) -> None:
        """They fail, and nothing more will be pushed for them."""
        for transfer in transfers:
            transfer.fail(reason, cause)
            self.finish(transfer)

    # On a sender's thread.

    def _on_finished(self, transfers: Sequence[Transfer]) -> None:
        """No write of them can follow."""
        # Those without a grant may wait for it here: the others are reported before.
        late = [transfer for transfer in transfers if transfer.state.waits_for_grant]
        for together in ([transfer for transfer in transfers if transfer not in late], *([each] for each in late)):
            for transfer in together:
                self._check_weights(transfer)
                transfer.finish()
                self._observer.transfer_ended(
                    transfer.ticket, transfer.num_bytes, transfer.bytes_at_end, transfer.state.cause
                )
            self.peers.report(together)

    def _check_weights(self, transfer: Transfer) -> None:
        """All of the prompt must be computed with the weights that decode was told of (R8). They change between steps,
        and its last layer has been computed by now."""
        before, now = transfer.weights, self._loaded.current
        if before.version != now.version:
            names = f"from {before.fingerprint or 'unknown ones'} to {now.fingerprint or 'unknown ones'}"
            reason = f"prefill's weights were updated before all KV was sent, {names}"
            transfer.fail(reason, PushFailure.WEIGHTS)

    # On the control thread.

    def _on_told(self, transfer: Transfer) -> None:
        """Decode knows how it ended, or cannot be reached."""
        self._observer.transfer_reported(transfer.ticket)
        if transfer.failure is not None:
            logger.warning(
                "request %s: KV was not delivered to decode engine %s at %s:%d: %s: its answer says so",
                transfer.request_id,
                transfer.ticket.remote_engine_id,
                transfer.ticket.remote_host,
                transfer.ticket.remote_port,
                transfer.failure,
            )
            with self._changed:
                self._failed[transfer.request_id] = transfer.failure

    def _on_ended(self, transfer: Transfer) -> None:
        """After `_on_told`: nothing reads the request's blocks any more."""
        with self._changed:
            transfer.ended = True
            if transfer.released:
                self._done.add(transfer.request_id)
            self._changed.notify_all()
