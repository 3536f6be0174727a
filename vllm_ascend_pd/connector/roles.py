# SPDX-License-Identifier: Apache-2.0
"""The interface between the facade (`connector.py`) and the four roles (`roles/`).

A role is a side of the transfer (prefill, decode) in one kind of process (scheduler, worker). vLLM calls every hook on
every connector, so each method here does nothing, and a role overrides those that concern it.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.bootstrap_server import BootstrapServer
from vllm_ascend_pd.connector.metrics import HandshakeMetadata
from vllm_ascend_pd.connector.model import model_summary
from vllm_ascend_pd.connector.patches.vllm_0_23_and_0_30_refusals import bind_refusals
from vllm_ascend_pd.connector.setup import EngineSetup, sharding
from vllm_ascend_pd.connector.vllm_view import VllmBlocks
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.core.hosts import prefill_peers
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.step import DecodeStep, PrefillStep, WorkerReport
from vllm_ascend_pd.decode.listener import DescriptionListener
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.worker import DecodeWorker, decode_description, encode_description
from vllm_ascend_pd.observe.stats import Data, DecodeSchedulerStats, PrefillSchedulerStats, PrefillStats
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler
from vllm_ascend_pd.prefill.ticket_listener import TicketListener
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.transport.keys import load_keys
from vllm_ascend_pd.transport.own_networks import own_networks

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# vLLM shows what its own loggers and their children log.
logger = logging.getLogger(f"vllm.{__name__}")

CLOSE_TIMEOUT_S = 5.0
"""Longest wait for each thing that a role closes."""


@dataclass(frozen=True)
class TransferResults:
    """Ids of requests whose transfers have ended on this rank since the last call."""

    # Sent: vLLM may free their blocks.
    sent: set[str] = field(default_factory=set)
    # Received or failed: vLLM may use or free their blocks.
    received: set[str] = field(default_factory=set)
    # Those of `received` that have failed, if vLLM learns of failures by request.
    failed: set[str] = field(default_factory=set)


class ConnectorRole:
    """A role that does nothing.

    A worker has it until its caches are registered, and every process has it after shutdown.
    """

    # In a worker, on the model's thread.

    def handshake(self) -> "KVConnectorHandshakeMetadata | None":
        """Returns what the engine's scheduler is told of this rank when the engine starts."""
        return None

    def sleep(self) -> None:
        """Ends all transfers and unregisters memory. A second call does nothing."""

    def wake(self) -> None:
        """Registers memory again. Does nothing unless the role sleeps."""

    def preempted(self, step: Any) -> None:
        """Waits until nothing reads the blocks of the step's preempted requests, which are about to be reused."""

    def start_step(self, step: Any) -> None:
        """Begins a step. `step`: a PrefillStep or a DecodeStep, by the engine's side."""

    def await_buffer(self, layer: str | int) -> None:
        """Waits until a layer's buffer may be overwritten. `layer`: its name, or its number on this rank. Any thread
        calls it."""

    def layer_written(self, layer: str) -> None:
        """The cache has the KV of the layer that is saved next. `layer`: its name, or ""."""

    def layer_computed(self, layer: str) -> None:
        """The layer has been computed. `layer`: its name."""

    def end_step(self, error: BaseException | None) -> None:
        """All layers have been computed, or `error` ended the forward pass."""

    def take_results(self, error: BaseException | None) -> TransferResults:
        """Returns the transfers that have ended. May wait as long as the step says. `error`: as in `end_step`."""
        return TransferResults()

    def take_lost_blocks(self) -> set[int]:
        """Returns blocks of requests that have just failed, if vLLM learns of failures by blocks."""
        return set()

    def take_report(self) -> WorkerReport | None:
        """Returns what the scheduler is told after this step."""
        return None

    # In the scheduler, on its thread.

    def take_handshakes(self, ranks: "Mapping[tuple[int, int], KVConnectorHandshakeMetadata]") -> None:
        """Takes the ranks' descriptions of themselves, by (pipeline stage, rank): when they have started, and whenever
        the engine has been woken."""

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Takes vLLM's block pool."""

    def arrived(self, request: "Request") -> None:
        """Takes note of a new request."""

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int | None:
        """Returns how many of the request's tokens a transfer will deliver. Called right before allocation.

        None: the request must not be scheduled in this step.
        """
        return 0

    def allocated(self, request: "Request", blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        """Takes the blocks that a request was allocated, per cache group."""

    def build_step(self, output: "SchedulerOutput") -> PrefillStep | DecodeStep:
        """Returns the step for the ranks that belongs to vLLM's step `output`."""
        raise NotImplementedError

    def update(self, report: WorkerReport | None, sent: set[str], received: set[str]) -> None:
        """Takes the ranks' report, and requests that all ranks have reported as sent, or as received or failed."""

    def finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Takes note of a request's end. Returns whether its blocks must be kept, and what its response says."""
        return False, None

    def has_pending_pushes(self) -> bool:
        """Whether a request has ended whose blocks the ranks may still read."""
        return False

    # In either.

    def take_stats(self) -> Data | None:
        """Returns what was counted since the last call. None: nothing is reported."""
        return None

    def close(self) -> None:
        """Closes all that the role owns, even if a part of it raises."""


# The connector in the scheduler of a decode engine.


class DecodeSchedulerRole(ConnectorRole):
    """The scheduler's role on a decode engine. `measured`: what the scheduler's observer counts."""

    def __init__(
        self, setup: EngineSetup, scheduler: DecodeScheduler, blocks: VllmBlocks, measured: DecodeSchedulerStats
    ) -> None:
        self.scheduler = scheduler
        self._measured = measured
        self._setup = setup
        self._blocks = blocks
        # Tells prefill what this engine looks like. None until all ranks have described themselves.
        self._listener: DescriptionListener | None = None
        # How often the ranks have described themselves anew, because the engine had slept.
        self._renewals = 0

    def take_handshakes(self, ranks: "Mapping[tuple[int, int], KVConnectorHandshakeMetadata]") -> None:
        descriptions, settings = [], {}
        for _, handshake in sorted(ranks.items()):
            if not isinstance(handshake, HandshakeMetadata):
                raise ConfigError(
                    f"the handshake metadata is {type(handshake).__name__}, another connector's: on a decode engine "
                    "LayerwisePushConnector must be the first of a MultiConnector's connectors that has any"
                )
            descriptions.append(decode_description(handshake.encoded))
            settings = handshake.settings
        setup, parallel = self._setup, self._setup.vllm_config.parallel_config
        if self._listener is not None:
            if self._listener.description.ranks == tuple(descriptions):
                return
            self._renewals += 1
        # After a sleep, prefill treats this engine as one that was started again at the same address.
        engine_id = f"{setup.started_as}.{self._renewals}" if self._renewals else setup.started_as
        engine = EngineDescription(
            engine_id=engine_id,
            model=model_summary(setup.vllm_config),
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            ranks=tuple(descriptions),
            dcp=parallel.decode_context_parallel_size,
            interleave=sharding(setup.vllm_config).interleave,
            settings=settings,
        )
        if self._listener is not None:
            self._listener.description = engine
            logger.info("this engine is awake, and describes itself anew as %s", engine_id)
            self.scheduler.renamed(engine_id)
            return
        keys = load_keys(setup.config.side_channel_key_file)
        hosts = prefill_peers(setup.config.prefill_allowlist, setup.host, keys is not None, own_networks())
        self._listener = DescriptionListener(engine, setup.host, setup.port, keys, hosts)
        self.scheduler.started()

    def bind_block_pool(self, pool: "BlockPool") -> None:
        self._blocks.bind(pool)
        bind_refusals(pool, self.scheduler.take_refused)

    def arrived(self, request: "Request") -> None:
        self._blocks.arrived(request)
        self.scheduler.arrived(request)

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int | None:
        if not self._blocks.is_ready(request):
            return None
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def allocated(self, request: "Request", blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_step(self, output: "SchedulerOutput") -> DecodeStep:
        self._blocks.take_adapters()
        return self.scheduler.build_step(output.num_scheduled_tokens)

    def update(self, report: WorkerReport | None, sent: set[str], received: set[str]) -> None:
        self.scheduler.update(report, received)

    def finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finished(request)

    def take_stats(self) -> Data | None:
        return self._measured.take() or None

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self.scheduler.close)
            if self._listener is not None:
                closing.callback(self._listener.close, CLOSE_TIMEOUT_S)


# The connector in a rank of a decode engine.


class DecodeWorkerRole(ConnectorRole):
    """A decode rank.

    settings: of the model, as `EngineDescription` has them.
    fails_by_request: whether vLLM learns of failures by request. Otherwise it learns of them by lost blocks.
    closing: closes the worker and what it uses.
    always_has_stats: whether there are statistics in every step.
    """

    def __init__(
        self,
        worker: DecodeWorker,
        settings: Mapping[str, str],
        fails_by_request: bool,
        closing: ExitStack,
        always_has_stats: bool,
    ) -> None:
        self._worker = worker
        self._settings = dict(settings)
        self._fails_by_request = fails_by_request
        self._closing = closing
        self._always_has_stats = always_has_stats
        self._lost_blocks: set[int] = set()

    def handshake(self) -> HandshakeMetadata:
        return HandshakeMetadata(encode_description(self._worker.description), self._settings)

    def sleep(self) -> None:
        self._worker.sleep()

    def wake(self) -> None:
        self._worker.wake()

    def start_step(self, step: DecodeStep) -> None:
        self._worker.start_step(step)

    def take_results(self, error: BaseException | None) -> TransferResults:
        arrivals = self._worker.take_arrivals()
        if self._fails_by_request:  # vLLM learns of a failure when the transfer has ended
            return TransferResults(received=arrivals.finished, failed=arrivals.failed)
        self._lost_blocks |= arrivals.lost_blocks
        return TransferResults(received=arrivals.finished)

    def take_lost_blocks(self) -> set[int]:
        """vLLM ends or reschedules these requests at once, and keeps their blocks until they count as received."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def take_report(self) -> WorkerReport | None:
        return self._worker.take_report()

    def take_stats(self) -> Data | None:
        return {} if self._always_has_stats else None

    def close(self) -> None:
        self._closing.close()


# The connector in the scheduler of a prefill engine.


class PrefillSchedulerRole(ConnectorRole):
    """The scheduler's role on a prefill engine.

    measured: what the scheduler's observer counts.
    listener: takes tickets for prompts that a router asks prefill for first. None: such prompts are not kept.
    bootstrap: tells routers for MooncakeConnector of this engine. None: nothing does, or another engine of this host.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        blocks: VllmBlocks,
        measured: PrefillSchedulerStats,
        listener: TicketListener | None,
        bootstrap: BootstrapServer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.listener = listener
        self._bootstrap = bootstrap
        self._measured = measured
        self._blocks = blocks

    def bind_block_pool(self, pool: "BlockPool") -> None:
        self._blocks.bind(pool)

    def arrived(self, request: "Request") -> None:
        self._blocks.arrived(request)
        self.scheduler.arrived(request)

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int | None:
        return 0 if self._blocks.is_ready(request) else None

    def allocated(self, request: "Request", blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks)

    def build_step(self, output: "SchedulerOutput") -> PrefillStep:
        self._blocks.take_adapters()
        return self.scheduler.build_step(output)

    def update(self, report: WorkerReport | None, sent: set[str], received: set[str]) -> None:
        self.scheduler.update(report, sent)

    def finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request)

    def has_pending_pushes(self) -> bool:
        return self.scheduler.has_pending_pushes

    def take_stats(self) -> Data | None:
        return self._measured.take() or None

    def close(self) -> None:
        with ExitStack() as closing:
            for server in (self.listener, self._bootstrap):  # the last one first
                if server is not None:
                    closing.callback(server.close, CLOSE_TIMEOUT_S)


# The connector in a rank of a prefill engine.


class PrefillWorkerRole(ConnectorRole):
    """A prefill rank.

    measured: what the worker's observer counts.
    closing: closes the worker and what it uses.
    always_has_stats: whether there are statistics in every step.
    caches_of: the caches of layers that have several, by the name that `layer_computed` gets.
    in_order: the caches of each layer, in the order of layers.
    """

    def __init__(
        self,
        worker: PrefillWorker,
        measured: PrefillStats,
        closing: ExitStack,
        always_has_stats: bool,
        caches_of: Mapping[str, Sequence[str]],
        in_order: Sequence[Sequence[str]],
    ) -> None:
        self._worker = worker
        self._measured = measured
        self._closing = closing
        self._always_has_stats = always_has_stats
        self._caches_of = caches_of
        self._in_order = in_order

    def sleep(self) -> None:
        self._worker.sleep()

    def wake(self) -> None:
        self._worker.wake()

    def preempted(self, step: PrefillStep) -> None:
        self._worker.preempted(step.preempted)

    def start_step(self, step: PrefillStep) -> None:
        self._worker.start_step(step)

    def await_buffer(self, layer: str | int) -> None:
        caches = self._in_order[layer] if isinstance(layer, int) else self._caches_of.get(layer, (layer,))
        self._worker.await_buffers(caches)

    def layer_written(self, layer: str) -> None:
        self._worker.layer_written(layer)

    def layer_computed(self, layer: str) -> None:
        for name in self._caches_of.get(layer, (layer,)):
            self._worker.layer_computed(name)

    def end_step(self, error: BaseException | None) -> None:
        self._worker.forward_ended(error)
        self._worker.end_step()

    def take_results(self, error: BaseException | None) -> TransferResults:
        self._worker.forward_ended(error)
        return TransferResults(sent=self._worker.take_sent())

    def take_report(self) -> WorkerReport | None:
        return self._worker.take_report()

    def take_stats(self) -> Data | None:
        return self._measured.take(self._worker.status) or ({} if self._always_has_stats else None)

    def close(self) -> None:
        self._closing.close()
