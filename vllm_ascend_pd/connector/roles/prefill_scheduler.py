# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler of a prefill engine."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.bootstrap_server import BootstrapServer
from vllm_ascend_pd.connector.role import CLOSE_TIMEOUT_S, ConnectorRole
from vllm_ascend_pd.connector.vllm_blocks import VllmBlocks
from vllm_ascend_pd.core.step import PrefillStep, WorkerReport
from vllm_ascend_pd.observe.stats import Data, PrefillSchedulerStats
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler
from vllm_ascend_pd.prefill.ticket_listener import TicketListener

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


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

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int:
        self.scheduler.prepare(request)
        return 0

    def allocated(self, request: "Request", blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks)

    def build_step(self, output: "SchedulerOutput") -> PrefillStep:
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
