# SPDX-License-Identifier: Apache-2.0
"""A connector that transfers nothing and writes down how it is called: `kv_connector_module_path` loads it.

Scheduler and worker share this module where both are in one process, and so share `EVENTS`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.forward_context import ForwardContext, get_forward_context

import cann_on_host
from vllm_ascend_pd.connector import caches as caches_module

EVENTS: list[dict[str, Any]] = []
"""What was called, in order: `hook`, `side` ("scheduler" or "worker") and what is worth knowing of its arguments."""

STEPS_TO_RECEIVE = 2
"""How many steps the worker of a decode engine lets pass before it says that a request's KV has arrived."""


@dataclass
class Step(KVConnectorMetadata):
    receive: list[str] = field(default_factory=list)


@dataclass
class Report(KVConnectorWorkerMetadata):
    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        return self


class RecordingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._side = role.name.lower()
        self._receives = vllm_config.kv_transfer_config.is_kv_consumer
        self._wanted: set[str] = set()
        self._step = Step()
        self._arriving: dict[str, int] = {}
        self._steps = 0
        self._caches: dict[str, Any] = {}
        self._saved = 0  # layers in this step
        self._record("__init__", engine_id=vllm_config.kv_transfer_config.engine_id)

    def _record(self, hook: str, **facts: Any) -> None:
        EVENTS.append({"hook": hook, "side": self._side, **facts})

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches
        specs = {}
        for group in self._kv_cache_config.kv_cache_groups:
            per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            for layer in group.layer_names:
                spec = per_layer[layer] if per_layer else group.kv_cache_spec
                specs[layer] = {
                    "kind": type(spec).__name__,
                    "block_size": getattr(spec, "block_size", None),
                    "num_kv_heads": getattr(spec, "num_kv_heads", None),
                }
        self._record(
            "register_kv_caches",
            caches={
                layer: {
                    "type": type(parts).__name__,
                    "shapes": [list(part.shape) for part in parts],
                    "contiguous": [part.is_contiguous() for part in parts],
                    "dtypes": [str(part.dtype) for part in parts],
                    "devices": [part.device.type for part in parts],
                    "addresses": [part.data_ptr() for part in parts],
                }
                for layer, parts in kv_caches.items()
            },
            specs=specs,
            ours={
                layer: [spec.group, spec.block_size, spec.heads, spec.total_heads]
                for layer, spec in caches_module.layer_specs(self._kv_cache_config, self._vllm_config).items()
            },
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._record("handle_preemptions", bound=self.has_connector_metadata())

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Step)
        self._arriving |= dict.fromkeys(connector_metadata.receive, STEPS_TO_RECEIVE)
        self._record("bind_connector_metadata")

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._record("clear_connector_metadata")

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._saved = 0
        self._record("start_load_kv", stream=_stream())

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._record("wait_for_layer_load", layer=layer_name)

    def on_kv_cache_written(self, layer_name: str) -> None:
        """A hook of vllm-ascend alone. The layer is the one that is saved next: it is often not named."""
        layer = list(self._caches)[self._saved]
        rows = self._rows(layer, self._caches[layer], get_forward_context().attn_metadata)
        written = [bool(part.flatten(1).any(1).all()) for part in rows]
        self._record("on_kv_cache_written", layer=layer_name, written=written, stream=_stream(), launches=_launches())

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        launches = _launches()
        own = self._caches[layer_name]
        self._saved += 1
        rows = self._rows(layer_name, kv_layer, attn_metadata)
        self._record(
            "save_kv_layer",
            layer=layer_name,
            same=[given.data_ptr() == part.data_ptr() for given, part in zip(kv_layer, own, strict=True)],
            stream=_stream(),
            launches=launches,
            tokens=len(rows[0]),
            written=[bool(part.flatten(1).any(1).all()) for part in rows],
            # Of a prompt that repeats one token: what is rotated by its position differs from row to row.
            constant=[bool(torch.allclose(part, part[:1].expand_as(part), atol=1e-5)) for part in rows],
        )

    def _rows(self, layer: str, kv_layer: Any, attn_metadata: Any) -> list[torch.Tensor]:
        """Returns this step's rows of each tensor, as they are when all that is queued so far has run."""
        if isinstance(attn_metadata, dict):  # MLA hands on what all layers share
            attn_metadata = attn_metadata[layer]
        slots = attn_metadata.slot_mapping.long()
        slots = slots[slots >= 0]
        return [part.flatten(0, 1)[slots].float().cpu() for part in kv_layer]

    def wait_for_save(self) -> None:
        self._record("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._arriving = {request: steps - 1 for request, steps in self._arriving.items()}
        arrived = {request for request, steps in self._arriving.items() if steps == 0}
        for request in arrived:
            del self._arriving[request]
        self._record("get_finished", finished=sorted(finished_req_ids), received=sorted(arrived))
        return None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._record("get_block_ids_with_load_errors")
        return set()

    def get_handshake_metadata(self) -> None:
        self._record("get_handshake_metadata")

    def build_connector_worker_meta(self) -> Report:
        self._steps += 1
        self._record("build_connector_worker_meta", step=self._steps)
        return Report(self._steps)

    # Scheduler side.

    def get_finished_count(self) -> int | None:
        self._record("get_finished_count")
        return None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = request.num_prompt_tokens - num_computed_tokens if self._receives else 0
        self._record("get_num_new_matched_tokens", request=request.request_id, computed=num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = [list(group) for group in blocks.get_block_ids()]
        if num_external_tokens > 0:
            self._step.receive.append(request.request_id)
        self._record("update_state_after_alloc", request=request.request_id, blocks=ids, external=num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step, self._step = self._step, Step()
        self._record("build_connector_meta", tokens=scheduler_output.total_num_scheduled_tokens)
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        self._record(
            "update_connector_output",
            step=report.step if isinstance(report, Report) else None,
            received=sorted(connector_output.finished_recving or ()),
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._record("request_finished", request=request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._record("request_finished_all_groups", request=request.request_id, groups=len(block_ids))
        return False, None

    # Both.

    def shutdown(self) -> None:
        self._record("shutdown")


def _stream() -> int:
    return int(torch.npu.current_stream().npu_stream)


def _launches() -> int | None:
    """Returns how many operators were launched so far, if that is counted."""
    return sum(cann_on_host.launches().values()) if cann_on_host.is_active() else None
