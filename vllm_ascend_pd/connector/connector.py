# SPDX-License-Identifier: Apache-2.0
"""`LayerwisePushConnector`: vLLM's KV connector interface, one line per hook.

vLLM builds one connector per process. What it does depends on the engine's side (prefill, decode) and on the process
(scheduler, worker): see `core/role.py`.
"""

import sys
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from vllm_ascend_pd.connector.build import Connected, connect_scheduler, connect_worker
from vllm_ascend_pd.connector.metrics import (
    HandshakeMetadata,
    LayerwisePushPromMetrics,
    LayerwisePushStats,
    ReportMetadata,
    StepMetadata,
)
from vllm_ascend_pd.connector.registration import log_as_vllm_does
from vllm_ascend_pd.connector.setup import read_setup
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS
from vllm_ascend_pd.core.caches import KVCache
from vllm_ascend_pd.core.role import ConnectorRole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class LayerwisePushConnector(KVConnectorBase_V1, SupportsHMA):
    if hasattr(base, "CacheHitSource"):  # from vLLM 0.32 on: what its metrics call the tokens that prefill delivers
        _cache_hit_source = base.CacheHitSource.P2P

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig | None" = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_as_vllm_does()  # a library may have changed the root logger since the plugin was loaded
        self._setup = read_setup(vllm_config, kv_cache_config)
        self._is_worker = role is KVConnectorRole.WORKER
        # A worker is connected when its KV caches are registered.
        self._connect(Connected() if self._is_worker else connect_scheduler(self._setup))

    def _connect(self, connected: Connected) -> None:
        self._connected, self._role = connected, connected.role

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, KVCache]) -> None:
        self._connect(connect_worker(self._setup, kv_caches))

    def unregister_kv_caches(self) -> None:
        """A hook of vLLM 0.33: the memory of the caches is about to be freed (`/sleep`)."""
        self._role.sleep()

    def restore_kv_caches(self) -> None:
        """A hook of vLLM 0.33: the caches have memory again, at the same addresses."""
        self._role.wake()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        handshake = self._role.handshake()
        return None if handshake is None else HandshakeMetadata(*handshake)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._role.preempted(_step(kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # The step starts here and not in start_load_kv, which vLLM 0.30 calls after the forward pass.
        super().bind_connector_metadata(connector_metadata)
        self._role.start_step(_step(connector_metadata))

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Does nothing: prefill writes into decode's cache, so nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads nothing: a request runs only once all its KV has arrived.

        On prefill, the layer's buffer may still hold another layer's KV, which is being sent.
        """
        self._role.await_buffer(layer_name)

    # vllm-ascend's AscendMultiConnector looks for these four. It has AscendStore wait before it loads KV into a buffer.

    supports_layerwise_buffer_reuse = True

    @property
    def is_producer(self) -> bool:
        return self._setup.prefills

    @property
    def connector_worker(self) -> ConnectorRole | None:
        """Something in a worker, None in a scheduler."""
        return self._role if self._is_worker else None

    def wait_for_layer_reuse(self, layer_idx: int) -> None:
        self._role.await_buffer(layer_idx)

    def on_kv_cache_written(self, layer_name: str) -> None:
        """A hook of vllm-ascend: the cache has the KV of the layer that is saved next. Its attention comes later."""
        if self.has_connector_metadata():
            self._role.mark_cached(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: KVCache, attn_metadata: Any, **kwargs: Any) -> None:
        if self.has_connector_metadata():
            self._role.push_layer(layer_name)

    # vLLM calls these three when a forward pass has ended, and some of them also when an exception ends it.

    def wait_for_save(self) -> None:
        if self.has_connector_metadata():
            self._role.end_forward(sys.exc_info()[1])
            self._role.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns requests that are sent, and those received or failed. vLLM before 0.30 calls it."""
        self._role.end_forward(sys.exc_info()[1])
        results = self._role.take_results()
        return results.sent or None, results.received or None

    if HAS_TRANSFER_RESULTS:

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            self._role.end_forward(sys.exc_info()[1])
            results = self._role.take_results()
            return base.KVConnectorTransferResults(results.sent, results.received, results.failed)

    @property
    def role(self) -> ConnectorRole:
        return self._role

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._role.take_lost_blocks()

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        report = self._role.take_report()
        return None if report is None else ReportMetadata(report)

    # In the scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._role.take_handshakes(metadata)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._role.take_handshakes({(0, tp_rank): handshake for tp_rank, handshake in metadata.items()})

    def get_finished_count(self) -> int | None:
        """Every rank reports every request exactly once, even if it had nothing to send or receive."""
        return int(self._setup.vllm_config.parallel_config.world_size)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Returns all groups: prefill writes to the request's own blocks, of every cache group."""
        return tuple(range(len(self._setup.caches.kv_cache_groups)))

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._role.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        self._role.add_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._role.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._role.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def update_state_before_preempt(
        self, request: "Request", block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """A hook of vllm-ascend's recompute scheduler, which asks it on decode. Returns True: the request is preempted.

        Otherwise that scheduler ends the request, for vllm-ascend's own proxy to send again.
        """
        return True

    def steps_lost(self) -> None:
        """A patch of vLLM calls it after a fault, when all requests have ended and no step is on its way."""
        self._role.steps_lost()

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        return StepMetadata(self._role.build_step(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        output = connector_output
        ended = output.finished_sending if self._setup.prefills else output.finished_recving
        self._role.loads_failed(output.invalid_block_ids)
        self._role.update(_report(output.kv_connector_worker_meta), set(ended or ()))

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._role.end_request(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._role.end_request(request)

    def has_pending_push_work(self) -> bool:
        return self._role.has_pending_pushes

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns False, so that decode keeps its full graphs. vLLM does not say which side asks.

        Decode needs no layer's hook. Prefill computes prompts in piecewise graphs or in none, unless the user asks for
        full graphs only (FULL). Then the hooks do not run, and `end_step` pushes all layers.
        """
        return False

    # In either.

    def get_kv_connector_stats(self) -> LayerwisePushStats | None:
        data = self._connected.take_stats()
        return None if data is None else LayerwisePushStats(data)

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

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """A hook of vLLM 0.33. Returns True: transfers end before the engine sleeps (`unregister_kv_caches`)."""
        return True

    def shutdown(self) -> None:
        closing = self._connected.closing
        self._connect(Connected())
        closing.close()


def _step(metadata: KVConnectorMetadata) -> Any:
    assert isinstance(metadata, StepMetadata)
    return metadata.step


def _report(metadata: Any) -> Any:
    assert metadata is None or isinstance(metadata, ReportMetadata)
    return None if metadata is None else metadata.report
