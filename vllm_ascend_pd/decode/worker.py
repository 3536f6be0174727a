# SPDX-License-Identifier: Apache-2.0
"""The decode side of one rank: expects KV for tickets, and tells vLLM which requests' KV has arrived.

Two threads take part:

- The model thread owns `DecodeWorker`. It posts new tickets and cancellations to the control thread.
- The control thread (`pd-grants`) owns `GrantService`, which has all open tickets. It answers prefill ranks.

What has ended comes back through an `ArrivalQueue`, the only object that both threads change.
"""

import functools
import logging
import threading
import time
from contextlib import ExitStack

import msgspec

from vllm_ascend_pd.core.caches import RegisteredCaches
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.decode_ticket import DecodeTicket
from vllm_ascend_pd.core.observer import Observer
from vllm_ascend_pd.core.protocol import RankDescription
from vllm_ascend_pd.core.role import ConnectorRole, TransferResults
from vllm_ascend_pd.core.step import DecodeStep, Expect, WorkerReport
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.core.topology import RankInfo
from vllm_ascend_pd.core.weights import LoadedWeights, WeightUpdates
from vllm_ascend_pd.decode.arrivals import ArrivalQueue, Arrivals
from vllm_ascend_pd.decode.checksums import Verifier
from vllm_ascend_pd.decode.grants import UNKNOWN_WEIGHTS, GrantService, OpenTicket
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.event import Event
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.peers import Peers
from vllm_ascend_pd.transport.side_channel import SideChannelServer

logger = logging.getLogger(__name__)


class DecodeWorker(ConnectorRole):
    """One rank of a decode engine. vLLM's model thread calls all methods."""

    def __init__(
        self,
        rank_info: RankInfo,
        config: ConnectorConfig,
        device: Device,
        engine: TransferEngine,
        caches: RegisteredCaches,
        loaded: LoadedWeights | None = None,
        observer: Observer | None = None,
        fails_by_request: bool = True,
        peers: Peers | None = None,
    ) -> None:
        """Starts the control thread.

        `engine`: prefill ranks write through it, so `caches` must be registered with it.
        `loaded`: the model's weights; None if they are not known.
        `observer`: hears of every ticket; None if nothing listens.
        `fails_by_request`: whether vLLM learns of failures by request. Otherwise it learns of them by lost blocks.
        `peers`: the prefill engines that may write; None: those of this host, without a secret.

        Raises SideChannelError if this rank cannot listen.
        """
        self._config = config
        self._device = device
        self._engine = engine
        self._loaded = loaded or LoadedWeights()
        self._updates = WeightUpdates(f"{rank_info.pp_rank}/{rank_info.rank}", self._loaded)
        self._settings = dict(rank_info.settings)
        self._fails_by_request = fails_by_request
        # Those that vLLM has not been told of.
        self._lost_blocks: set[int] = set()
        # Seconds that this step waits for KV.
        self._wait_s = 0.0
        # Requests whose tickets were opened and that no step has brought back yet.
        self._open_requests: set[str] = set()
        # Requests that the next `take_arrivals` brings back again, as the scheduler has asked for.
        self._again: set[str] = set()
        # Whether the last step brought something that had ended.
        self._brought = False
        self._observer = observer or Observer()
        self._arrivals = ArrivalQueue()
        # What the scheduler has not been told of.
        self._report = WorkerReport()
        # None without `verify_kv`.
        self._verifier = Verifier(rank_info, device, caches, config.trace_dir) if config.verified_share else None
        self._grants = GrantService(
            config,
            caches.description,
            rank_info.rank,
            rank_info.sharding,
            self._loaded,
            self._arrivals,
            self._observer,
            engine.limits.apply_s,
        )
        peers = peers or Peers()
        self._server = SideChannelServer(
            rank_info.host,
            0,
            self._grants.handle,
            self._grants.tick,
            name="pd-grants",
            secret=peers.secret,
            hosts=peers.hosts,
        )
        self.description = RankDescription(
            rank_info.pp_rank,
            rank_info.tp_rank,
            self._server.endpoint,
            engine.session,
            caches.description,
            engine.transport,
        )

    def handshake(self) -> tuple[bytes, dict[str, str]]:
        return msgspec.msgpack.encode(self.description), self._settings

    @owned
    def start_step(self, step: DecodeStep) -> None:
        """Begins a step: posts the scheduler's new tickets and cancellations. Call it before the forward pass."""
        now = time.monotonic()
        self._wait_s = step.wait_s
        self._arrivals.wake_at(step.wakeup_address)
        opened = []
        if step.expects:
            vacated = self._device.record_event()
            opened = [self._open(expect, vacated, step, now) for expect in step.expects]
            self._open_requests.update(expect.request_id for expect in step.expects)
        if opened or step.prefilled or step.cancelled:
            self._server.call(functools.partial(self._grants.begin_step, opened, step, now))
        if step.report_again is not None:
            self._again = step.report_again - self._open_requests  # the others will be reported
            self._updates.report_again()
        if self._verifier is not None:
            for expect, reason in self._verifier.verify_again(step.begun):
                self._report.overwritten[expect.request_id] = reason, expect.blocks

    def _open(self, expect: Expect, vacated: Event, step: DecodeStep, now: float) -> OpenTicket:
        ticket = DecodeTicket(
            expect.ticket_id,
            expect.digest,
            now + self._config.queue_timeout_s,
            self._config.transfer_timeout_s,
            self._config.lease_s,
        )
        version = None
        if expect.cached_tokens:  # the KV must fit the cached part, which the weights of now computed
            is_stale = self._updates.are_unknown_to(step.weight_updates)
            version = UNKNOWN_WEIGHTS if is_stale else self._loaded.current.version
        return OpenTicket(expect, ticket, vacated, version)

    def take_results(self) -> TransferResults:
        arrivals = self.take_arrivals()
        if self._fails_by_request:  # vLLM learns of a failure when the transfer has ended
            return TransferResults(received=arrivals.closed, failed=arrivals.failed)
        self._lost_blocks |= arrivals.lost_blocks
        return TransferResults(received=arrivals.closed)

    def take_lost_blocks(self) -> set[int]:
        """vLLM ends or reschedules these requests at once, and keeps their blocks until they count as received."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    @owned
    def take_arrivals(self) -> Arrivals:
        """Returns the requests whose tickets are closed, each once, and what else has arrived since the last call.

        Waits for one, `DecodeStep.wait_s` seconds at most. It does not wait right after a step that brought one: the
        scheduler made this step without it, and what it computes next must not be delayed.
        """
        wait_s = self._wait_s if self._open_requests and not (self._brought or self._again) else 0.0
        arrivals = self._arrivals.take(wait_s)
        if self._verifier is not None:
            self._verifier.begin(arrivals.delivered)
            for delivered, mismatch in self._verifier.take(0.0 if arrivals.closed else wait_s):
                arrivals.ticket_verified(delivered, mismatch)
        self._report = self._report.merge(arrivals.report)
        self._open_requests -= arrivals.closed
        arrivals.closed |= self._again
        self._again = set()
        self._brought = bool(arrivals.closed or arrivals.lost_blocks)
        return arrivals

    @owned
    def take_report(self) -> WorkerReport | None:
        """Returns what the scheduler must hear of this rank; None if there is nothing."""
        report, self._report = self._report, WorkerReport()
        report.weight_updates = self._updates.take_news()
        if self._verifier is not None:
            report.verified = self._verifier.take_counts()
        return report or None

    @owned
    def sleep(self) -> None:
        """Ends all transfers and unregisters the caches: their memory may be freed. Grants nothing until `wake`.

        Waits until each writer has stopped: longer than a lease and its settling time only if a process is stopped. Its
        bytes are refused afterwards, even if it goes on (R2).
        """
        quiet = threading.Event()
        self._server.call(functools.partial(self._grants.sleep, quiet, time.monotonic()))
        if not quiet.wait(self._config.lease_s + self._engine.limits.settle_s + self._config.control_timeout_s):
            logger.warning("this rank sleeps although a prefill rank has not reported that it stopped writing")
        if self._verifier is not None:
            self._verifier.sleep()
            self._arrivals.add(self._leave_unverified, wakes=False)
        self._device.idle(self._config.collective_timeout_s)
        self._engine.suspend()
        self._loaded.caches_lost()  # vLLM may not have emptied its prefix cache (R1)

    def _leave_unverified(self, news: Arrivals) -> None:
        """Hands on what has arrived while the verifier sleeps, so that it is not compared."""
        assert self._verifier is not None
        self._verifier.begin(news.delivered)
        news.delivered.clear()

    @owned
    def wake(self) -> None:
        """Registers the caches again, which are at the same addresses. `description` has what peers must learn anew."""
        self._engine.resume()
        self.description = msgspec.structs.replace(self.description, session=self._engine.session)
        if self._verifier is not None:
            self._verifier.wake()
        self._server.call(self._grants.wake)

    def close(self, timeout_s: float) -> None:
        """Ends the control thread. Open tickets are forgotten."""
        with ExitStack() as closing:  # all of them, even if one raises
            closing.callback(self._observer.close, timeout_s)
            closing.callback(self._arrivals.close)
            closing.callback(self._server.close, timeout_s)
