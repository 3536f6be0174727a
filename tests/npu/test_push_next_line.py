# SPDX-License-Identifier: Apache-2.0
"""Layers that use buffers in turn, where the thread of vllm-ascend 0.30's AscendStore waits for the buffers, too."""

import sys
import threading
from collections import Counter
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.kv import Model, Prompt, Side, layer_name
from harness.rank_programs import ONCE, DecodeRank, Hooks, PrefillRank
from harness.ranks import MakePair, expect_delivery, prompts, run

pytestmark = [pytest.mark.npu, pytest.mark.long]

VARIABLE = "CANN_ON_HOST_TEST_VLLM"
"""Ranks with this variable have a process that has imported no other vLLM."""


class StorePrefillRank(PrefillRank):
    """AscendMultiConnector has this connector and AscendStore, whose thread prefetches layers.

    No layer has anything to load. So the thread waits until the layer before in the buffer is saved and sent, and says
    that the buffer has what it had to load. The model's thread waits for that.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        sys.path.insert(0, str(Path(sys.prefix, "vllm-0.30")))
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector
        from vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.ascend_store_connector import AscendStoreConnector
        from vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.kv_transfer import KVCacheStoreLayerRecvingThread
        from vllm_ascend.distributed.kv_transfer.kv_pool.ascend_store.pool_worker import KVPoolWorker

        from vllm_ascend_pd.connector.connector import LayerwisePushConnector

        layers, reused = self.model.layers, self.side.buffers
        wait, self.waiting_threads = self.worker.await_buffer, Counter[str]()

        def await_buffer(layer: int) -> None:
            self.waiting_threads[threading.current_thread().name] += 1
            wait(layer_name(layer))

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
        self.worker.await_buffer = multi.wait_for_layer_load  # type: ignore[method-assign]
        self._saved, self._synced = saved, synced

    def step(self, step: Any, prompts: dict[str, Prompt], hooks: Hooks = ONCE) -> None:
        self.store.current_layer = self.store.next_layer_to_submit = 0
        for event in self._saved:
            event.clear()
        super().step(step, prompts, hooks)

    def compute(self, layer: int, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().compute(layer, copies)
        self.worker.mark_cached(layer_name(layer))  # by on_kv_cache_written: AscendStore may save the layer first
        self._synced[layer].record()  # as AscendStore, when it has saved the layer
        self._saved[layer].set()
        self.store.current_layer += 1

    def waited(self) -> Counter[str]:
        """Returns how often each thread has waited for a buffer."""
        return self.waiting_threads


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", [1, 2])
def test_ascend_store_waits_for_buffers_that_layers_use_in_turn(
    tp: int, monkeypatch: pytest.MonkeyPatch, make_pair: MakePair
) -> None:
    """12 layers in 4 buffers. Side streams are late, so a buffer that is not waited for has another layer's KV."""
    monkeypatch.setenv("CANN_ON_HOST_DELAY_SIDE_US", "20000")
    monkeypatch.setenv(VARIABLE, "0.30")
    sides = Side(tp, num_blocks=24, block_size=128, buffers=4), Side(1, num_blocks=24, block_size=128)
    pair = make_pair(Model(layers=12), *sides, device="npu", programs=(StorePrefillRank, DecodeRank))
    requests = prompts(pair, [1, 127, 128, 129, 300])
    run(pair, requests, chunk=200)
    expect_delivery(pair, requests)
    for waited in pair.each(pair.p_ranks, "waited"):
        steps = waited["MainThread"] / 4  # the first layers of a step load nothing, so the model's thread waits
        assert waited["KVCacheStoreLayerRecvingThread"] == 8 * steps > 0
