# SPDX-License-Identifier: Apache-2.0
"""The prefill side of the installed vllm-ascend's layerwise connector without the engine around it: what benchmarks
compare with. Its classes run as they are; only what their constructors would find in vLLM's state is given here."""

import queue
from types import SimpleNamespace
from typing import Any


class NoTransfer:
    """Mooncake's transfer engine at its own interface, as far as either side calls it; no byte moves."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        return 0

    def send_probe(self, session: str) -> int:
        return 0

    def batch_transfer_sync_write(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        return 0

    def batch_transfer_async_write(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        self.batch_transfer_sync_write(session, src, dst, lengths)
        return 1

    def transfer_check_status(self, batch: int) -> int:
        return 1

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        return 0


def vllm_config() -> Any:
    """Returns the parts of vLLM's configuration that the worker and its thread read."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_producer=True, is_kv_consumer=False),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        speculative_config=None,
    )


def worker(*, tp: int, rank: int, ratio: int, total_heads: int, spec: Any, layers: dict[str, Any], **more: Any) -> Any:
    """A producer's `MooncakeLayerwiseConnectorWorker` of one cache group, with a queue in place of its thread.
    `layers`: its `LayerMetadata` by layer; `ratio`: P TP size to D's; `more`: attributes."""
    from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_layerwise_connector as layerwise

    made = object.__new__(layerwise.MooncakeLayerwiseConnectorWorker)
    vars(made).update(
        vllm_config=vllm_config(),
        kv_cache_specs=[spec],
        num_kv_cache_groups=1,
        attn_resharding_group_idx={0} if ratio > 1 else set(),
        block_size=[spec.block_size],
        kernel_block_size_scale=[1],
        layer_metadata=layers,
        index_to_name={i: [layer] for i, layer in enumerate(layers)},
        total_layers=len(layers),
        tp_size=tp,
        tp_rank=rank,
        pcp_size=1,
        pcp_rank=0,
        dcp_size=1,
        dcp_rank=0,
        use_mla=False,
        total_num_kv_heads=total_heads,
        pd_head_ratio=ratio,
        num_head_replica=1,
        enable_kv_quant=False,
        enable_c8_quant=False,
        engine_id="prefill",
        kv_send_layer_thread=SimpleNamespace(send_queue=queue.Queue()),
        **more,
    )
    return made


def ticket(remote_block_ids: list[int], block_size: int, remote_tp: int) -> dict[str, Any]:
    """Returns `kv_transfer_params` as its decode side posts them."""
    return {
        "remote_block_ids": [remote_block_ids],
        "remote_block_size": [block_size],
        "remote_engine_id": "decode",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_tp_size": remote_tp,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
    }
