# SPDX-License-Identifier: Apache-2.0
"""The control plane of a prefill rank: one thread that owns the state of all transfers and peers.

It describes decode engines (`Peers`), asks for grants, renews them and reports (`TransferControl`). The model's thread
and senders post messages to it. They read `TicketView`s and `Outcomes`.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.hosts import decode_hosts
from vllm_ascend_pd.core.observer import PrefillObserver
from vllm_ascend_pd.core.prefill_ticket import RunningTime
from vllm_ascend_pd.core.protocol import Message, Revoke
from vllm_ascend_pd.core.ticket import Ticket
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.prefill.fit import FitCheck
from vllm_ascend_pd.prefill.outcomes import Outcomes
from vllm_ascend_pd.prefill.peers import Peers
from vllm_ascend_pd.prefill.routes import Routes
from vllm_ascend_pd.prefill.sender import Sender
from vllm_ascend_pd.prefill.staging import StagingRing
from vllm_ascend_pd.prefill.step_transfer import StepTransfer
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.prefill.transfer_control import TransferControl
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.keys import load_keys
from vllm_ascend_pd.transport.own_networks import own_networks
from vllm_ascend_pd.transport.side_channel import SideChannelClient
from vllm_ascend_pd.transport.wakeup import WakeupSocket


class ControlPlane:
    """The thread `pd-control` with the peers and transfers that it owns, and the senders' threads."""

    def __init__(
        self,
        rank_info: RankInfo,
        config: ConnectorConfig,
        engine: TransferEngine,
        ring: StagingRing[StepTransfer] | None,
        running_time: RunningTime,
        loaded: LoadedWeights,
        routes: Routes,
        fit: FitCheck,
        observer: PrefillObserver,
    ) -> None:
        """Starts the thread."""
        self._running_time = running_time
        # The model's thread makes it, the control thread reads it. None until the scheduler names an address.
        self._wakeup: WakeupSocket | None = None
        # Read by the model's thread.
        self.outcomes = Outcomes()
        keys = load_keys(config.side_channel_key_file)
        self._client = SideChannelClient(self._on_unasked, self._on_tick, name="pd-control", keys=keys, start=False)
        self._transfers = TransferControl(
            self._client,
            rank_info,
            config,
            engine.limits.settle_s,
            running_time,
            routes,
            self.outcomes,
            observer,
        )

        def make_sender(name: str) -> Sender:
            return Sender(
                name,
                engine,
                ring,
                self._transfers,
                loaded,
                running_time,
                observer,
                queue_size=config.push_queue_size,
                ready_timeout_s=config.collective_timeout_s + config.write_timeout_s,
            )

        signed = config.ticket_secret_file is not None
        hosts = decode_hosts(config.decode_allowlist, rank_info.host, signed, own_networks())
        self._peers = Peers(self._client, self._transfers, engine, make_sender, fit, hosts, config.control_timeout_s)
        self._client.start()

    # On the model's thread.

    def acquire(self, ticket: Ticket) -> Sender:
        """See `Peers.acquire`."""
        return self._peers.acquire(ticket)

    def release(self, ticket: Ticket) -> None:
        """See `Peers.release`."""
        self._peers.release(ticket)

    def open(self, transfers: Sequence[Transfer]) -> None:
        """Begins to ask for grants for these transfers. A sender must have been acquired for each ticket."""
        self._client.call(partial(self._open, transfers))

    def wake_at(self, address: str) -> None:
        """A datagram to `address` wakes whoever waits for an outcome. Only the first address counts."""
        if self._wakeup is None:
            self._wakeup = wakeup = WakeupSocket(address)
            self._client.watch(wakeup.fileno(), partial(self._woken, wakeup))

    def close(self, timeout_s: float) -> None:
        with ExitStack() as closing:  # all of them, even if one raises
            closing.callback(self._peers.close, timeout_s)
            if self._wakeup is not None:
                closing.callback(self._wakeup.close)
            closing.callback(self._client.close, timeout_s)

    # On the control thread.

    def _woken(self, wakeup: WakeupSocket) -> None:
        wakeup.clear()
        self.outcomes.wake()

    def _open(self, transfers: Sequence[Transfer]) -> None:
        self._transfers.add(transfers)
        self._peers.open(transfers)

    def _on_unasked(self, endpoint: str, message: Message) -> None:
        if isinstance(message, Revoke):
            self._transfers.revoke(endpoint, message)

    def _on_tick(self, now: float) -> None:
        self._running_time()
        self._peers.tick(now)
        self._transfers.tick()
