# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler of a decode engine."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.connector.engine_setup import EngineSetup
from vllm_ascend_pd.connector.metadata import HandshakeMetadata
from vllm_ascend_pd.connector.model_summary import model_summary
from vllm_ascend_pd.connector.parallel_ranks import sharding
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_32_refusals import bind_refusals
from vllm_ascend_pd.connector.role import CLOSE_TIMEOUT_S, ConnectorRole
from vllm_ascend_pd.connector.vllm_blocks import VllmBlocks
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.step import DecodeStep, WorkerReport
from vllm_ascend_pd.decode.listener import DescriptionListener
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.worker import decode_description
from vllm_ascend_pd.observe.stats import Data, DecodeSchedulerStats
from vllm_ascend_pd.transport.keys import load_keys

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


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
        engine = EngineDescription(
            engine_id=setup.started_as,
            model=model_summary(setup.vllm_config),
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            ranks=tuple(descriptions),
            dcp=parallel.decode_context_parallel_size,
            interleave=sharding(setup.vllm_config).interleave,
            settings=settings,
        )
        keys = load_keys(setup.config.side_channel_key_file)
        self._listener = DescriptionListener(engine, setup.host, setup.port, keys)
        self.scheduler.described(descriptions)

    def bind_block_pool(self, pool: "BlockPool") -> None:
        self._blocks.bind(pool)
        bind_refusals(pool, self.scheduler.take_refused)

    def arrived(self, request: "Request") -> None:
        self._blocks.arrived(request)
        self.scheduler.arrived(request)

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int | None:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def allocated(self, request: "Request", blocks: tuple[list[int], ...], num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_step(self, output: "SchedulerOutput") -> DecodeStep:
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
