# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/plan.py: a prefill rank's threads without a model, ours and vllm-ascend's, one step at a time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from helpers import vllm_ascend_producer
from helpers.plan_step import (
    BLOCK,
    HEAD_SIZE,
    KV_HEADS,
    PARTS,
    TIMEOUT_S,
    Case,
    Cost,
    Decode,
    Handed,
    Stopwatch,
    our_ticket,
)


class Ours:
    """`tensors`: K and V by layer. Mooncake's engine is one that does nothing."""

    def __init__(self, tensors: dict[str, Any], decode: Decode, case: Case) -> None:
        from harness.rank_programs import HOST, MODEL
        from vllm_ascend_pd.core.caches import describe
        from vllm_ascend_pd.core.config import parse_config
        from vllm_ascend_pd.core.layout import LayerSpec
        from vllm_ascend_pd.core.topology import RankInfo, sharding
        from vllm_ascend_pd.observe.stats import PrefillStats
        from vllm_ascend_pd.prefill.worker import PrefillWorker
        from vllm_ascend_pd.transport.batches import TransferLimits
        from vllm_ascend_pd.transport.engine import TransferEngine

        self._decode, self._case, self._layers = decode, case, list(tensors)
        self.handed = Handed()
        with mock.patch("mooncake.engine.TransferEngine", return_value=self.handed):
            engine = TransferEngine(HOST, "ascend", TransferLimits.over("ascend"), None)
        spec = LayerSpec(0, BLOCK, case.heads, KV_HEADS)
        caches = describe(tensors, dict.fromkeys(tensors, spec), heads_first=False)
        rank_info = RankInfo("prefill", MODEL, HOST, 0, sharding(case.ratio), 0, 1, tuple(range(case.ratio)))
        self._device = device_without_kernels()
        config = parse_config({})
        measured = PrefillStats(rank_info)
        self._worker = PrefillWorker(rank_info, config, self._device, engine, caches, case.tokens, observer=measured)
        self._p_blocks, self._d_blocks = case.block_ids(1), case.block_ids(2)

    def step(self) -> Cost:
        from vllm_ascend_pd.core.step import PrefillStep, Send

        case, worker = self._case, self._worker
        names = [f"request-{i}" for i in range(case.requests)]
        port = self._decode.port
        tickets = {name: our_ticket(name, ids, 1, port) for name, ids in zip(names, self._d_blocks, strict=True)}
        self._decode.expect(tickets)
        tokens = case.blocks * BLOCK
        sends = [
            Send(name, 0, tokens, (list(blocks),), last=True)
            for name, blocks in zip(tickets, self._p_blocks, strict=True)
        ]
        watch = Stopwatch("pd-sender", "pd-control")
        with watch.model("plan"):
            worker.start_step(PrefillStep(tickets, sends=sends))
        for i, layer in enumerate(self._layers):
            self.handed.count = 0
            with watch.model("save"):
                worker.mark_cached(layer)
                worker.push_layer(layer)
            self.handed.wait(i)
        watch.all_written()
        with watch.model("plan"):
            worker.end_step()
            worker.start_step(PrefillStep(finished=dict.fromkeys(tickets)))
        self._await_sent(set(tickets))
        return watch.cost(len(self._layers))

    def _await_sent(self, requests: set[str]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while requests:
            if (report := self._worker.take_report()) is not None and report.failed:
                raise RuntimeError(f"ours failed: {report.failed}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"ours did not end {requests}")
            requests = requests - self._worker.take_results().sent
            time.sleep(0.002)

    def close(self) -> None:
        self._worker.close(5.0)
        self._device.close()


def device_without_kernels() -> Any:
    """An NPU on which an all-to-all does nothing, and has no other ranks."""
    from vllm_ascend_pd.device.npu import NpuDevice

    class Device(NpuDevice):
        def new_groups(self, rank_lists: Any, timeout_s: float) -> Any:
            return {ranks: SimpleNamespace(size=partial(len, ranks)) for ranks in rank_lists}

        def all_to_all(self, out: Any, inp: Any, group: Any) -> None:
            pass

    return Device()


class _Buffer:
    """The reference's registered memory for regrouped KV, of which nothing is written."""

    def __init__(self, address: int) -> None:
        import torch

        self.device = torch.device("npu")
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def __getitem__(self, rows: slice) -> "_Buffer":
        return self

    def copy_(self, kv: Any) -> None:
        pass


@contextmanager
def reference_without_kernels() -> Iterator[None]:
    """As `device_without_kernels` and ops that do nothing are for ours."""
    import torch_npu
    from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_layerwise_connector as layerwise

    def load(*args: Any, **kwargs: Any) -> None:
        pass

    with (
        mock.patch.object(torch_npu.atb, "npu_paged_cache_load", load),
        mock.patch.object(layerwise, "kv_alltoall_and_rearrange", lambda ratio, keys, values: (keys, values)),
    ):
        yield


class Reference:
    """As `Ours`."""

    def __init__(self, tensors: dict[str, Any], decode: Decode, case: Case) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_layerwise_connector as layerwise

        self._module, self._case, self._tensors = layerwise, case, tensors
        self.handed = Handed()
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=case.heads, head_size=HEAD_SIZE, dtype=torch.bfloat16)
        ours, theirs = {}, {}
        for layer, parts in tensors.items():
            block_bytes = [part[0].nbytes for part in parts]
            scale = [1] * PARTS
            bases = [part.data_ptr() for part in parts]
            ours[layer] = layerwise.LayerMetadata([0] * PARTS, bases, block_bytes, scale)
            wide = [case.ratio * size for size in block_bytes]
            theirs[layer] = layerwise.LayerMetadata([0] * PARTS, decode.bases(layer), wide, scale)
        buffers = {"k_buffer": _Buffer(1 << 40), "v_buffer": _Buffer(1 << 41)}
        self._worker = worker = vllm_ascend_producer.worker(
            tp=case.ratio,
            rank=0,
            ratio=case.ratio,
            total_heads=KV_HEADS,
            spec=spec,
            layers=ours,
            resharding_stream=torch.npu.Stream() if case.ratio > 1 else None,
            remote_layer_metadata={"decode": {1: theirs}},
            remote_te_port={"decode": {1: decode.mooncake_port}},
            **buffers,
        )
        self._done = threading.Semaphore(0)
        ready = threading.Event()
        with mock.patch.object(layerwise, "get_world_group", return_value=SimpleNamespace(local_rank=0)):
            worker.kv_send_layer_thread = layerwise.KVCacheSendingLayerThread(
                engine=self.handed,
                vllm_config=worker.vllm_config,
                kv_cache_config=None,
                use_attn_mamba_hybrid=False,
                ready_event=ready,
                callback_func=lambda *args, trans_flag: self._done.release(int(trans_flag)) if trans_flag else None,
                **buffers,
                **{
                    name: getattr(worker, name)
                    for name in (
                        "kv_cache_specs",
                        "attn_resharding_group_idx",
                        "total_layers",
                        "tp_size",
                        "tp_rank",
                        "pd_head_ratio",
                        "num_head_replica",
                        "layer_metadata",
                        "use_mla",
                        "enable_kv_quant",
                        "enable_c8_quant",
                        "resharding_stream",
                    )
                },
            )
            worker.kv_send_layer_thread.start()
            if not ready.wait(TIMEOUT_S):
                raise RuntimeError("vllm-ascend's sending thread did not start")
        self._p_blocks, self._d_blocks = case.block_ids(1), case.block_ids(2)

    def step(self) -> Cost:
        worker, tokens = self._worker, self._case.blocks * BLOCK
        metadata = self._module.MooncakeLayerwiseConnectorMetadata()
        for i, (p_blocks, d_blocks) in enumerate(zip(self._p_blocks, self._d_blocks, strict=True)):
            ticket = vllm_ascend_producer.ticket(list(d_blocks), BLOCK, remote_tp=1)
            metadata.add_new_req(
                f"request-{i}",
                [list(p_blocks)],
                ticket,
                chunk_finish=True,
                prompt_len=tokens,
                local_computed_tokens=tokens,
            )
        watch = Stopwatch("KVCacheSendingLayerThread", None)
        with watch.model("plan"):
            worker.start_load_kv(metadata)
        if self._case.ratio > 1:  # of one block it launches nothing but the operators that do nothing here
            metadata.send_task.group_num_blocks = [1]
            metadata.send_task.group_num_tokens = [BLOCK]
        for i, (layer, parts) in enumerate(self._tensors.items()):
            self.handed.count = 0
            with watch.model("save"):
                worker.save_kv_layer(layer, list(parts), None, metadata)
            self.handed.wait(i)
        watch.all_written()
        for _ in range(self._case.requests):
            if not self._done.acquire(timeout=TIMEOUT_S):
                raise RuntimeError("vllm-ascend's connector did not end its requests")
        return watch.cost(len(self._tensors))
