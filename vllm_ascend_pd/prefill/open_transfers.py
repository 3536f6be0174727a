# SPDX-License-Identifier: Apache-2.0
"""All transfers of a prefill rank, from their tickets until vLLM may free their blocks.

The model's thread owns this. It learns from the control thread's `Outcomes` how transfers have ended.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import PrefillStatus
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.prefill.control import ControlPlane
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.transfer import Outcome, Transfer, TransferQueue, Withdrawals


class OpenTransfers:
    """The transfers of a prefill rank, by request id."""

    def __init__(self, config: ConnectorConfig, loaded: LoadedWeights, control: ControlPlane) -> None:
        self._config = config
        self._loaded = loaded
        self._control = control
        self._by_request: dict[str, Transfer] = {}
        # What writes to each decode engine, by the issuer of its tickets, and how many of the transfers it has.
        self._senders: dict[tuple[str, str], Sender] = {}
        self._users: Counter[tuple[str, str]] = Counter()
        # Transfers that lacked a grant at the last look.
        self._ungranted: list[Transfer] = []
        # Whether the scheduler has woken the rank since its last wait: the next one does not wait either.
        self._woken = False
        # Shared by all transfers: see `LeaseCheck`.
        self._withdrawals = Withdrawals()
        # Request ids whose blocks may be freed.
        self._done: set[str] = set()
        # By request id: why its KV was not delivered, if the scheduler has not been told yet.
        self._failed: dict[str, str] = {}

    def __getitem__(self, request_id: str) -> Transfer:
        return self._by_request[request_id]

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._by_request.values()))

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request_id: str) -> Transfer | None:
        return self._by_request.get(request_id)

    @owned
    def open(self, tickets: dict[str, Ticket], cached_tokens: dict[str, int]) -> list[Transfer]:
        """Opens a transfer for each ticket, by request id, and begins to ask for grants."""
        opened, now = [], time.monotonic()
        for request_id, ticket in tickets.items():
            sender = self._senders[ticket.issuer] = self._control.acquire(ticket)
            self._users[ticket.issuer] += 1
            transfer = Transfer(
                request_id,
                ticket,
                sender,
                PrefillTicket(now + self._config.grant_timeout_s),
                self._withdrawals,
                cached_tokens.get(request_id, 0),
                self._loaded.current,
            )
            self._by_request[request_id] = transfer
            opened.append(transfer)
        if opened:
            self._control.open(opened)
            self._ungranted = [*self._still_ungranted(), *opened]
        return opened

    def sender_of(self, issuer: tuple[str, str]) -> Sender:
        """Returns what writes to the decode engine that issued an open ticket."""
        return self._senders[issuer]

    @owned
    def finish(self, *transfers: Transfer) -> None:
        """Ends the pushing for these transfers. May be called any number of times."""
        of: dict[TransferQueue, list[Transfer]] = {}
        for transfer in transfers:
            of.setdefault(transfer.sender, []).append(transfer)
        for sender, finishing in of.items():
            sender.finish(finishing)

    @owned
    def lose(self, transfers: Iterable[Transfer], reason: str, cause: PushFailure) -> None:
        """Fails these transfers and ends the pushing for them."""
        for transfer in transfers:
            transfer.fail(reason, cause)
            self.finish(transfer)

    @owned
    def release(self, request_id: str, aborted: str | None) -> None:
        """Records that vLLM is done with the request. `aborted`: why it was aborted; None if it was not."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return
        if aborted is not None:
            transfer.fail(aborted, PushFailure.ABORTED)
        self.finish(transfer)
        transfer.released = True
        if transfer.is_over:
            self._done.add(request_id)

    @owned
    def wake_at(self, address: str) -> None:
        """Lets the scheduler end a waiting `take_done` by a datagram to `address` (`transport/wakeup.py`)."""
        self._control.wake_at(address)

    @owned
    def free(self, request_ids: Collection[str]) -> None:
        """vLLM may free the blocks of these requests, which have no transfers."""
        self._done.update(request_ids)

    @owned
    def take_done(self, wait_s: float, awaits_tickets: bool = False) -> set[str]:
        """Returns the requests whose blocks vLLM may free: it is done with them, and no push reads them any more.

        Waits for one at most `wait_s`, if there are transfers or `awaits_tickets`, or until the scheduler wakes it.
        Raises RuntimeError if a sender has ended by a bug.
        """
        self._take_outcomes()
        deadline = time.monotonic() + wait_s
        while wait_s and (self._by_request or awaits_tickets) and not self._done and not self._woken:
            outcome = self._control.outcomes.take(deadline)
            if outcome is None:
                break
            self._take(outcome)
        self._woken = False
        done, self._done = self._done, set()
        for sender in self._senders.values():
            sender.check()
        for request_id in done:
            transfer = self._by_request.pop(request_id, None)
            if transfer is None:
                continue
            issuer = transfer.ticket.issuer
            self._users[issuer] -= 1
            if not self._users[issuer]:
                del self._users[issuer], self._senders[issuer]
            self._control.release(transfer.ticket)
        return done

    @owned
    def take_failed(self) -> dict[str, str]:
        """Returns why KV was not delivered, by request id: failures since the last call."""
        self._take_outcomes()
        failed, self._failed = self._failed, {}
        return failed

    @owned
    def status(self, restart_needed: bool) -> PrefillStatus:
        """Returns how the rank is now. `restart_needed`: passed on."""
        self._ungranted = self._still_ungranted()
        queued = sum(sender.queued for sender in self._senders.values())
        return PrefillStatus(queued, len(self._ungranted), restart_needed)

    def close(self, timeout_s: float) -> None:
        for transfer in self:  # so that no sender waits for its grants any more
            transfer.fail("prefill shuts down", PushFailure.ABORTED)
        self._control.close(timeout_s)

    def _take_outcomes(self) -> None:
        """Takes all outcomes that have arrived. Does not wait."""
        outcomes = self._control.outcomes
        while not outcomes.is_empty:
            if (outcome := outcomes.take(0.0)) is None:
                self._woken = True
            else:
                self._take(outcome)

    def _take(self, outcome: Outcome) -> None:
        transfer = outcome.transfer
        if not outcome.is_over:
            assert outcome.failure is not None
            self._failed[transfer.request_id] = outcome.failure
            return
        transfer.is_over = True
        if transfer.released:
            self._done.add(transfer.request_id)

    def _still_ungranted(self) -> list[Transfer]:
        """Looks only at transfers that waited at the last look: a transfer that has all grants keeps them."""
        return [transfer for transfer in self._ungranted if transfer.waits_for_grant]
