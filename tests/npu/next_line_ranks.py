# SPDX-License-Identifier: Apache-2.0
"""Ranks with code of vllm-ascend 0.30: sparse attention's caches, where an index has one of its own
(next_line_caches.py), and AscendStore, which waits for buffers that layers use in turn."""

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import torch

from harness.kv import Model, Prompt, layer_name
from harness.rank_programs import ONCE, DecodeRank, Hooks, PrefillRank
from vllm_ascend_pd.core.layout import LayerSpec

VARIABLE = "CANN_ON_HOST_TEST_VLLM"
"""Ranks with this variable have a process that has imported no other vLLM."""


@dataclass(frozen=True)
class SparseModel(Model):
    """`main`, `keys`: names of the specs in next_line_caches.py."""

    main: str = "MAIN"
    keys: str = "KEYS"


def _import_0_30() -> None:
    if (path := str(Path(sys.prefix, "vllm-0.30"))) not in sys.path:
        sys.path.insert(0, path)


class _SparseRank:
    """What both sides' ranks add to those of the harness."""

    def make(self: Any) -> tuple[dict[str, tuple[torch.Tensor, ...]], dict[str, LayerSpec]]:
        _import_0_30()
        import next_line_caches as next_line
        from vllm_ascend_pd.connector.caches import caches_of_layers

        layers = [layer_name(layer) for layer in self.side.layers_of(self.pp_rank, self.model)]
        specs = next_line.of_layers(
            layers, *(getattr(next_line, which) for which in (self.model.main, self.model.keys))
        )
        _, caches, ours = next_line.made(specs, self.side.num_blocks, self.on)
        self.announced = caches_of_layers(ours)
        return caches, ours

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]
        # To the tests a layer has one tuple of tensors, as in vllm-ascend 0.23.
        parts = self.caches
        self.caches = {
            layer: tuple(part for name in self.announced.get(layer, [layer]) for part in parts[name])
            for layer in parts
            if layer.endswith(".attn")
        }


class SparsePrefillRank(_SparseRank, PrefillRank):
    def __post_init__(self) -> None:
        super().__post_init__()
        computed = self.worker.layer_computed

        def all_computed(layer: str) -> None:
            for name in self.announced.get(layer, [layer]):
                computed(name)

        self.worker.layer_computed = all_computed  # type: ignore[method-assign]


class SparseDecodeRank(_SparseRank, DecodeRank):
    pass


class StorePrefillRank(PrefillRank):
    """AscendMultiConnector has this connector and AscendStore, whose thread prefetches layers.

    No layer has anything to load. So the thread waits until the layer before in the buffer is saved and sent, and says
    that the buffer has what it had to load. The model's thread waits for that.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _import_0_30()
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector
        from vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.ascend_store_connector import AscendStoreConnector
        from vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.kv_transfer import KVCacheStoreLayerRecvingThread
        from vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.pool_worker import KVPoolWorker

        from vllm_ascend_pd.connector.connector import LayerwisePushConnector

        layers, reused = self.model.layers, self.side.buffers
        wait, self.waiting_threads = self.worker.await_buffers, Counter[str]()

        def await_buffer(layer: int) -> None:
            self.waiting_threads[threading.current_thread().name] += 1
            wait([layer_name(layer)])

        ours = LayerwisePushConnector.__new__(LayerwisePushConnector)
        vars(ours).update(
            _setup=SimpleNamespace(prefills=True), _is_worker=True, _role=SimpleNamespace(await_buffer=await_buffer)
        )
        self.store = KVPoolWorker.__new__(KVPoolWorker)
        loaded, saved, synced = ([kind() for _ in range(layers)] for kind in (Event, Event, torch.npu.Event))
        backend, database = SimpleNamespace(set_device=lambda: None), SimpleNamespace(group_block_len=[[0, 0]])
        thread = KVCacheStoreLayerRecvingThread(
            backend, database, 128, 0, 1, 1, 0, Event(), Event(), loaded, saved, synced, layers, group_builders=[None]
        )
        vars(self.store).update(
            use_layerwise_transfer=True,
            num_layers=layers,
            num_prefetch_layers=2,
            kv_recv_thread=thread,
            layer_load_finished_events=loaded,
            layer_load_tasks=[[] for _ in range(layers)],
            prefetch_layer_map={layer: layer - reused for layer in range(reused, layers)},
        )
        connector = AscendStoreConnector.__new__(AscendStoreConnector)
        vars(connector).update(
            connector_worker=self.store, use_layerwise=True, _mamba_copy_bufs=None, _mamba_state=None
        )
        multi = AscendMultiConnector.__new__(AscendMultiConnector)
        multi._connectors = [ours, connector]
        multi._configure_layerwise_reuse_completion()
        thread.start()

        def wait_for_layer_load(names: Sequence[str]) -> None:
            for name in names:
                multi.wait_for_layer_load(name)

        self.worker.await_buffers = wait_for_layer_load  # type: ignore[method-assign, assignment]
        self._saved, self._synced = saved, synced

    def step(self, step: Any, prompts: dict[str, Prompt], hooks: Hooks = ONCE) -> None:
        self.store.current_layer = self.store.next_layer_to_submit = 0
        for event in self._saved:
            event.clear()
        super().step(step, prompts, hooks)

    def compute(self, layer: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().compute(layer, copies)
        self.worker.layer_written(layer_name(layer))  # by on_kv_cache_written: AscendStore may save the layer first
        self._synced[layer].record()  # as AscendStore, when it has saved the layer
        self._saved[layer].set()
        self.store.current_layer += 1

    def waited(self) -> Counter[str]:
        """Returns how often each thread has waited for a buffer."""
        return self.waiting_threads
