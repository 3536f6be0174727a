# SPDX-License-Identifier: Apache-2.0
"""Asks decode ranks for grants, renews them, and reports to them how transfers ended.

The control thread owns the `TransferControl` and the tickets' states. Senders call `finish` when no write of a transfer
follows. The model's thread learns from `Outcomes` how it ended.
"""

import functools
import logging
import time
from collections.abc import Sequence

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.observer import PrefillObserver
from vllm_ascend_pd.core.prefill_ticket import GRANT_RETRY_S, Destination, Phase, RankKey, RunningTime
from vllm_ascend_pd.core.protocol import (
    GrantRefused,
    GrantRequest,
    Message,
    Revoke,
    WriteReport,
    WriterId,
)
from vllm_ascend_pd.core.reasons import PushFailure
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout, Routes
from vllm_ascend_pd.prefill.transfer import Outcome, Outcomes, Transfer
from vllm_ascend_pd.transport.side_channel import SideChannelClient, SideChannelError

logger = logging.getLogger(__name__)


class TransferControl:
    """Drives all transfers of a rank that are not over."""

    def __init__(
        self,
        client: SideChannelClient,
        rank_info: RankInfo,
        config: ConnectorConfig,
        settle_s: float,
        running_time: RunningTime,
        routes: Routes,
        outcomes: Outcomes,
        observer: PrefillObserver,
    ) -> None:
        """`settle_s`: how long bytes of a failed write may arrive."""
        self._client = client
        self._rank_info = rank_info
        self._timeout_s = config.control_timeout_s
        self._settle_s = settle_s
        self._running_time = running_time
        self._routes = routes
        self._outcomes = outcomes
        self._observer = observer
        # By number.
        self._transfers: dict[int, Transfer] = {}
        # Numbers of ended transfers whose revocation is being answered now.
        self._disclaimed: set[int] = set()

    # On a sender's thread.

    def finish(self, transfers: Sequence[Transfer]) -> None:
        """Says that no write of `transfers` follows. The sender does not touch them any more."""
        self._client.call(lambda: self._finish(transfers))

    # All that follows runs on the control thread.

    @owned
    def add(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._transfers[transfer.number] = transfer

    @owned
    def contact(self, transfer: Transfer, layout: DecodeLayout | None, refused: str | None) -> None:
        """Begins to ask the ranks of a decode engine for grants.

        layout: the engine's description; None if it did not describe itself.
        refused: why the engine gets nothing, None if it may. Its ranks are told the reason.
        """
        if refused is not None:
            self.fail(transfer, refused, PushFailure.UNREACHABLE if layout is None else PushFailure.UNFIT)
        destinations: dict[RankKey, Destination] = {}
        if layout is not None and transfer.failure is None:
            try:
                destinations = self._routes.destinations(layout, transfer.ticket)
            except (LookupError, ValueError) as error:
                reason = f"the ticket does not fit the decode engine's layout: {error!r}"
                self.fail(transfer, reason, PushFailure.UNFIT)
        if transfer.failure is not None and layout is not None:
            destinations = {(rank.pp_rank, rank.tp_rank): Destination(rank, ()) for rank in layout.description.ranks}
        with transfer.changing() as state:
            state.contacted(destinations)
        self._follow(transfer)

    @owned
    def fail(self, transfer: Transfer, reason: str, cause: PushFailure) -> None:
        """Fails the transfer. It ends as soon as the sender has no write of it in flight."""
        with transfer.changing() as state:
            state.fail(reason, cause)
        transfer.sender.finish([transfer])

    @owned
    def issued_by(self, issuer: tuple[str, str]) -> list[Transfer]:
        """Returns the transfers whose tickets `issuer` issued."""
        return [transfer for transfer in self._transfers.values() if transfer.ticket.issuer == issuer]

    @owned
    def tick(self) -> None:
        """Lets time pass for every transfer."""
        for transfer in list(self._transfers.values()):
            self._follow(transfer)

    @owned
    def revoke(self, endpoint: str, message: Revoke) -> None:
        """Handles a decode rank's revocation of a ticket. `endpoint`: where the message came from."""
        if message.writer != self._writer(message.writer.transfer):
            return
        transfer = self._transfers.get(message.writer.transfer)
        if transfer is None:
            self._disclaim(endpoint, message)
        elif endpoint in {d.rank.control for d in (transfer.state.destinations or {}).values()}:
            # Only ranks that the ticket's own engine has described may revoke it.
            self.fail(transfer, f"decode took the ticket back: {message.reason}", PushFailure.REVOKED)

    def _disclaim(self, endpoint: str, revoke: Revoke) -> None:
        """Answers the revocation of a transfer that is over: no byte of it is in flight."""
        number = revoke.writer.transfer
        if number in self._disclaimed:
            return
        self._disclaimed.add(number)
        self._client.request(
            endpoint,
            WriteReport(revoke.ticket_id, revoke.writer, "the transfer has ended", digest=revoke.digest),
            self._timeout_s,
            lambda answer: self._disclaimed.discard(number),
        )

    def _writer(self, number: int) -> WriterId:
        return WriterId(self._rank_info.engine_id, self._rank_info.pp_rank, self._rank_info.rank, number)

    def _finish(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            transfer.is_finishing = True
            transfer.state.mark_in_flight(transfer.in_flight_until)
            self._follow(transfer)

    def _follow(self, transfer: Transfer) -> None:
        """Takes the next steps of one transfer: ends the writing, asks for grants and renewals, notifies decode."""
        state = transfer.state
        transfer.take_failure()
        if transfer.is_finishing and state.phase is Phase.WRITING:
            with transfer.changing():
                complete = state.finish(time.monotonic())
            if complete is not None:
                self._observer.transfer_ended(transfer.ticket, transfer.num_bytes, transfer.bytes_at_end, state.cause)
        notify, due, is_over = state.notify(self._running_time()), state.due(time.monotonic()), state.end()
        for key in due:
            self._ask(transfer, key)
        if notify:
            self._notify(transfer)
        if is_over:
            del self._transfers[transfer.number]
            self._outcomes.put(Outcome(transfer, state.failure, is_over=True))

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
            self._rank_info.sharding,
            destination.covers,
            self._settle_s,
            self._rank_info.draft,
            weights=transfer.weights.fingerprint,
        )
        answered = functools.partial(self._on_grant, transfer, key, asked_at, destination.granted)
        self._client.request(destination.rank.control, request, self._timeout_s, answered)

    def _on_grant(
        self, transfer: Transfer, key: RankKey, asked_at: float, renewal: bool, answer: Message | SideChannelError
    ) -> None:
        self._observer.grant_answered(transfer.ticket, key, asked_at, renewal, type(answer).__name__)
        with transfer.changing() as state:
            refused = state.answered(key, asked_at, answer)
        if refused:
            transfer.sender.finish([transfer])
        elif isinstance(answer, GrantRefused):
            self._client.tick_within(GRANT_RETRY_S)
        if transfer.is_finishing:  # this answer may be all that it waited for
            self._follow(transfer)

    # The end.

    def _notify(self, transfer: Transfer) -> None:
        """Sends a round of reports. The next round follows when each request has an answer or has failed."""
        state = transfer.state
        pending = state.notify_pending()
        if not pending:
            self._notified(transfer)
            self._follow(transfer)
            return
        writer, settle_s = self._writer(transfer.number), state.settle_s(self._running_time())
        answers = 0

        def on_answer(key: RankKey, answer: Message | SideChannelError) -> None:
            nonlocal answers
            answers += 1
            if not isinstance(answer, SideChannelError):
                state.acked(key)
            if answers == len(pending):
                self._notify(transfer)

        for key, destination in pending.items():
            report = transfer.report(writer, key, state.failure, settle_s)
            answered = functools.partial(on_answer, key)
            self._client.request(destination.rank.control, report, self._timeout_s, answered)

    def _notified(self, transfer: Transfer) -> None:
        """Records that decode was notified of how the transfer ended, or cannot be reached."""
        if transfer.is_notified:
            return
        transfer.is_notified = True
        self._observer.transfer_reported(transfer.ticket)
        failure = transfer.state.failure
        if failure is not None:
            logger.warning(
                "request %s: KV was not delivered to decode engine %s at %s:%d: %s: its answer says so",
                transfer.request_id,
                transfer.ticket.remote_engine_id,
                transfer.ticket.remote_host,
                transfer.ticket.remote_port,
                failure,
            )
            self._outcomes.put(Outcome(transfer, failure, is_over=False))
