# SPDX-License-Identifier: Apache-2.0
"""What the schedulers of both sides do with vLLM's own objects: the ranks' handshakes, and the block pool."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.connector.metrics import HandshakeMetadata
from vllm_ascend_pd.connector.model import model_summary
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_33_hidden import bind_hidden
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_33_refusals import bind_refusals
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_33_window_holds import bind_window_holds
from vllm_ascend_pd.connector.setup import EngineSetup, sharding
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.core.step import DecodeStep
from vllm_ascend_pd.decode.listener import DescriptionListener
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

# vLLM shows what its own loggers and their children log.
logger = logging.getLogger(f"vllm.{__name__}")

CLOSE_TIMEOUT_S = 5.0
"""Longest wait for each thing that a connector closes."""


class VllmPrefillScheduler(PrefillScheduler):
    """A prefill engine's scheduler."""

    def bind_block_pool(self, pool: "BlockPool") -> None:
        super().bind_block_pool(pool)
        bind_window_holds(pool, self.release_windows)


class VllmDecodeScheduler(DecodeScheduler):
    """A decode engine's scheduler, which also describes its engine. `parts`: as `DecodeScheduler` has them."""

    def __init__(self, setup: EngineSetup, *parts: Any) -> None:
        super().__init__(*parts)
        self._setup = setup
        # Tells prefill what this engine looks like. None until all ranks have described themselves.
        self._listener: DescriptionListener | None = None
        # How often the ranks have described themselves anew, because the engine had slept.
        self._renewals = 0

    def take_handshakes(self, ranks: Mapping[tuple[int, int], Any]) -> None:
        descriptions, settings = [], {}
        for _, handshake in sorted(ranks.items()):
            if not isinstance(handshake, HandshakeMetadata):
                raise ConfigError(
                    f"the handshake metadata is {type(handshake).__name__}, another connector's: on a decode engine "
                    "LayerwisePushConnector must be the first of a MultiConnector's connectors that has any"
                )
            descriptions.append(msgspec.msgpack.decode(handshake.encoded, type=RankDescription))
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
            self.renamed(engine_id)
            return
        peers = setup.peers
        self._listener = DescriptionListener(engine, setup.host, setup.port, peers.secret, peers.hosts)
        self.started()

    def bind_block_pool(self, pool: "BlockPool") -> None:
        super().bind_block_pool(pool)
        bind_refusals(pool, self.take_refused)
        bind_hidden(pool, lambda: self.awaiting_prefill)

    def build_step(self, output: Any) -> DecodeStep:
        """`output`: vLLM's `SchedulerOutput`."""
        return super().build_step(output.num_scheduled_tokens)

    def close(self) -> None:
        with ExitStack() as closing:  # all of them, even if one raises
            closing.callback(super().close)
            if self._listener is not None:
                closing.callback(self._listener.close, CLOSE_TIMEOUT_S)
