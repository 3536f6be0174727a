# SPDX-License-Identifier: Apache-2.0
"""`LayerwisePushConnector`: vLLM's KV connector interface, handed on to the part that does the work.

vLLM builds one per process. What it does depends on its role (scheduler, worker) and the engine's (prefill, decode).
"""

import logging
import secrets
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group
from vllm.utils.network_utils import get_ip

from vllm_ascend_pd.connector import compat
from vllm_ascend_pd.connector.build import make_scheduler
from vllm_ascend_pd.connector.environment import device_type
from vllm_ascend_pd.connector.metadata import HandshakeMetadata, ReportMetadata, StepMetadata
from vllm_ascend_pd.connector.metrics import LayerwisePushPromMetrics, LayerwisePushStats
from vllm_ascend_pd.connector.model_settings import model_settings
from vllm_ascend_pd.connector.multi_connector import warn_if_asked_later
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_32_weight_loading import weights_of
from vllm_ascend_pd.connector.shared_engine import SharedEngine
from vllm_ascend_pd.connector.unsupported import unsupported, unsupported_weights
from vllm_ascend_pd.core.caches import KVCache, RegisteredCaches, describe
from vllm_ascend_pd.core.config import ConfigError, parse_config
from vllm_ascend_pd.core.protocol import EngineDescription
from vllm_ascend_pd.core.rank_info import RankInfo
from vllm_ascend_pd.core.weights import LoadedWeights
from vllm_ascend_pd.decode.listener import DescriptionListener
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.worker import Arrivals, DecodeWorker, decode_description, encode_description
from vllm_ascend_pd.device import make_device
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler
from vllm_ascend_pd.prefill.worker import PrefillWorker
from vllm_ascend_pd.transport.curve import load_keys
from vllm_ascend_pd.transport.engine import TransferEngine
from vllm_ascend_pd.transport.limits import TransferLimits

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class LayerwisePushConnector(KVConnectorBase_V1, SupportsHMA):
    _cache_hit_source = compat.FROM_ANOTHER_ENGINE  # vLLM's metric of cached tokens by source

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig | None" = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_role not in ("kv_producer", "kv_consumer"):
            raise ConfigError(
                f"kv_role is {transfer.kv_role}: LayerwisePushConnector prefills (kv_producer) or decodes (kv_consumer)"
            )
        self._config = parse_config(transfer.kv_connector_extra_config)
        if (reason := unsupported(vllm_config)) is not None:
            raise ConfigError(reason)
        self._engine_id: str = transfer.engine_id
        # A configured engine id outlives a restart; what prefill has learnt of the engine's ranks must not.
        self._started_as = f"{transfer.engine_id}-{secrets.token_hex(4)}"
        self._is_producer = bool(transfer.is_kv_producer)
        self._host = _own_host()
        if role is KVConnectorRole.WORKER and not self._is_producer:
            warn_if_asked_later()
        self._worker: PrefillWorker | DecodeWorker | None = None
        self._lost_blocks: set[int] = set()
        self._brings_stats = False
        self._engine: TransferEngine | None = None
        self._device: Any = None
        self._listener: DescriptionListener | None = None
        self._scheduler: PrefillScheduler | DecodeScheduler | None = None
        if role is KVConnectorRole.SCHEDULER:
            assert kv_cache_config is not None
            self._scheduler = make_scheduler(
                vllm_config, kv_cache_config, self._config, self._started_as, self._host, self._port
            )

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, KVCache]) -> None:
        assert self._kv_cache_config is not None
        if not self._is_producer and (reason := unsupported_weights(self._vllm_config)) is not None:
            raise ConfigError(reason)
        self._device = make_device(device_type())
        identity = self._make_identity()
        caches = describe(
            kv_caches,
            compat.layer_specs(self._kv_cache_config, self._vllm_config, identity.share),
            heads_first=self._device.name == "cpu",
        )
        self._check_declared("prefill" if self._is_producer else "decode", identity)
        self._brings_stats = not compat.ASKS_SCHEDULER_FOR_STATS and (identity.pp_rank, identity.rank) == (0, 0)
        protocol = self._config.transfer_protocol or self._device.transfer_protocol
        limits = TransferLimits.over(
            protocol, self._config.max_batch_descriptors, self._config.max_batch_bytes, self._config.write_timeout_s
        )
        self._engine = TransferEngine(self._host, protocol, limits, SharedEngine.find(protocol))
        self._engine.register(caches.regions(), of_caches=True)
        loaded = self._loaded_weights(caches, identity)
        if self._is_producer:
            step_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
            self._worker = PrefillWorker(
                identity, self._config, self._device, self._engine, caches, step_tokens, loaded
            )
        else:
            self._worker = DecodeWorker(identity, self._config, self._device, self._engine, caches, loaded)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if isinstance(self._worker, DecodeWorker):
            return HandshakeMetadata(encode_description(self._worker.description), model_settings(self._vllm_config))
        return None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(self._worker, PrefillWorker):
            assert isinstance(kv_connector_metadata, StepMetadata)
            self._worker.preempted(kv_connector_metadata.step.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Not in start_load_kv: vLLM 0.32 calls that after the forward pass.
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._worker is not None:
            self._worker.start_step(connector_metadata.step)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Nothing to load: decode is written to."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only once all its KV is there."""

    def on_kv_cache_written(self, layer_name: str) -> None:
        """vllm-ascend's: the layer that is saved next has its KV in the cache, its attention comes after this."""
        if isinstance(self._worker, PrefillWorker) and self.has_connector_metadata():
            self._worker.layer_written(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: KVCache, attn_metadata: Any, **kwargs: Any) -> None:
        if isinstance(self._worker, PrefillWorker) and self.has_connector_metadata():
            self._worker.layer_computed(layer_name)

    # vLLM calls these three when a forward pass has ended, some of them also when it ends in an exception.

    def wait_for_save(self) -> None:
        if isinstance(self._worker, PrefillWorker) and self.has_connector_metadata():
            self._worker.forward_ended(sys.exc_info()[1])
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(sent, received or failed), as vLLM before 0.32 asks for them."""
        if isinstance(self._worker, PrefillWorker):
            self._worker.forward_ended(sys.exc_info()[1])
            return self._worker.take_sent() or None, None
        arrivals = self._take_arrivals()
        return None, arrivals.finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of requests that have just failed. vLLM ends or reschedules those at once, and keeps their blocks
        until they are reported as received."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    if compat.HAS_TRANSFER_RESULTS:

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            if isinstance(self._worker, PrefillWorker):
                self._worker.forward_ended(sys.exc_info()[1])
                return compat.transfer_results(sent=self._worker.take_sent())
            arrivals = self._take_arrivals()
            return compat.transfer_results(received=arrivals.finished, failed=arrivals.failed)

    def _take_arrivals(self) -> Arrivals:
        if not isinstance(self._worker, DecodeWorker):
            return Arrivals(set(), set(), set())
        arrivals = self._worker.take_arrivals()
        assert self._kv_cache_config is not None
        if compat.HAS_TRANSFER_RESULTS and not compat.lost_blocks_say_all(self._kv_cache_config):
            return arrivals  # vLLM learns of failures as the requests end
        self._lost_blocks |= arrivals.lost_blocks
        return Arrivals(arrivals.finished, set(), set())

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = None if self._worker is None else self._worker.take_report()
        return None if report is None else ReportMetadata(report)

    # Scheduler side.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if not isinstance(self._scheduler, DecodeScheduler):
            return
        ranks, settings = [], {}
        for _, handshake in sorted(metadata.items()):
            if not isinstance(handshake, HandshakeMetadata):
                raise ConfigError(
                    f"the handshake metadata is {type(handshake).__name__}, another connector's: on a decode engine "
                    "LayerwisePushConnector must be the first of a MultiConnector's connectors that has any"
                )
            ranks.append(decode_description(handshake.encoded))
            settings = handshake.settings
        parallel = self._vllm_config.parallel_config
        description = EngineDescription(
            engine_id=self._started_as,
            model=compat.model_summary(self._vllm_config),
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            ranks=tuple(ranks),
            dcp=parallel.decode_context_parallel_size,
            interleave=compat.sharding(self._vllm_config).interleave,
            settings=settings,
        )
        keys = load_keys(self._config.side_channel_key_file)
        self._listener = DescriptionListener(description, self._host, self._port, keys)
        self._scheduler.described(ranks)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp_rank): m for tp_rank, m in metadata.items()})

    def get_finished_count(self) -> int | None:
        """Every rank reports every request exactly once, whether it had anything to send or receive or not."""
        return int(self._vllm_config.parallel_config.world_size)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Prefill writes to the request's own blocks, so every cache group is restored."""
        assert self._kv_cache_config is not None
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        if isinstance(self._scheduler, PrefillScheduler):
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        if isinstance(self._scheduler, PrefillScheduler):
            self._scheduler.prepare(request)
            return 0, False
        assert self._scheduler is not None
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if isinstance(self._scheduler, PrefillScheduler):
            self._scheduler.allocated(request, blocks.get_block_ids())
        else:
            assert self._scheduler is not None
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if isinstance(self._scheduler, PrefillScheduler):
            return StepMetadata(self._scheduler.build_step(scheduler_output))
        assert self._scheduler is not None
        return StepMetadata(self._scheduler.build_step(scheduler_output.total_num_scheduled_tokens > 0))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        metadata = connector_output.kv_connector_worker_meta
        assert metadata is None or isinstance(metadata, ReportMetadata)
        report = None if metadata is None else metadata.report
        if isinstance(self._scheduler, PrefillScheduler):
            self._scheduler.update(report, set(connector_output.finished_sending or ()))
        else:
            assert self._scheduler is not None
            self._scheduler.update(report, set(connector_output.finished_recving or ()))

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(self._scheduler, PrefillScheduler):
            return self._scheduler.finished(request)
        assert self._scheduler is not None
        return False, self._scheduler.finished(request)

    def has_pending_push_work(self) -> bool:
        return isinstance(self._scheduler, PrefillScheduler) and self._scheduler.has_pending_pushes

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. vLLM does not say which side asks, and a yes would cost decode its full graphs.

        Decode has no use for a layer's hooks. Prefill computes prompts in piecewise graphs or in none, unless all
        its graphs are to be full (FULL): then the hooks are left out, and `end_step` pushes what nobody announced.
        """
        return False

    # Both.

    def get_kv_connector_stats(self) -> LayerwisePushStats | None:
        source = self._worker if isinstance(self._worker, PrefillWorker) else self._scheduler
        data = {} if source is None else source.take_stats()
        return LayerwisePushStats(data) if data or self._brings_stats else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LayerwisePushStats:
        return LayerwisePushStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LayerwisePushPromMetrics:
        return LayerwisePushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        with ExitStack() as closing:  # all of them, in the opposite order, whatever one of them raises
            if isinstance(self._scheduler, DecodeScheduler):
                closing.callback(self._scheduler.close)
            if self._listener is not None:
                closing.callback(self._listener.close, _CLOSE_TIMEOUT_S)
            if self._engine is not None:
                closing.callback(self._engine.close)
            if self._device is not None:
                closing.callback(self._device.close)
            if self._worker is not None:
                closing.callback(self._worker.close, _CLOSE_TIMEOUT_S)
            self._worker = self._engine = self._device = self._listener = None

    @property
    def _port(self) -> int:
        """Each data-parallel engine of a node has its own listener."""
        index = getattr(self._vllm_config.parallel_config, "data_parallel_index", 0)
        return int(self._vllm_config.kv_transfer_config.kv_port) + int(index)

    def _make_identity(self) -> RankInfo:
        pp = get_pp_group()
        rank, stage_ranks = compat.place_in_stage()
        return RankInfo(
            engine_id=self._engine_id,
            model=compat.model_summary(self._vllm_config),
            host=self._host,
            rank=rank,
            sharding=compat.sharding(self._vllm_config),
            pp_rank=pp.rank_in_group,
            pp=pp.world_size,
            stage_ranks=stage_ranks,
            draft=compat.draft_summary(self._vllm_config),
            settings=model_settings(self._vllm_config),
        )

    def _loaded_weights(self, caches: RegisteredCaches, identity: RankInfo) -> LoadedWeights | None:
        """The record of the model whose layers, the draft's left out, have `caches`."""
        described, modules = caches.description, self._vllm_config.compilation_config.static_forward_context
        names = {tensor.layer for tensor in described.tensors if not described.geometry_of(tensor).draft}
        load_format = str(self._vllm_config.load_config.load_format)
        loaded = weights_of([modules[name] for name in sorted(names) if name in modules], load_format)
        if (identity.pp_rank, identity.rank) == (0, 0):
            if loaded is not None and loaded.current.fingerprint:
                logger.info("the model's weights are %s", loaded.current.fingerprint)
            else:
                logger.warning(
                    "which weights this engine has is not known (%s): they are not compared with the other engines'",
                    "the plugin vllm_ascend_pd was not loaded: see VLLM_PLUGINS"
                    if loaded is None
                    else f"load format {load_format} hands ranks no whole tensors of a checkpoint",
                )
        return loaded

    def _check_declared(self, side: str, identity: RankInfo) -> None:
        declared = getattr(self._config, side)
        for name, found in (("tp_size", identity.tp), ("pp_size", identity.pp)):
            if declared is not None and getattr(declared, name) not in (None, found):
                raise ConfigError(
                    f"kv_connector_extra_config: {side}.{name} is {getattr(declared, name)}, this engine's is {found}"
                )


def _own_host() -> str:
    """The address vLLM knows this host by: what listeners bind to and tickets name."""
    host: str = get_ip()
    if host in ("0.0.0.0", "::") and not envs.VLLM_HOST_IP:
        raise ConfigError("vLLM does not know this host's address, and all interfaces are too many: set VLLM_HOST_IP")
    return host
