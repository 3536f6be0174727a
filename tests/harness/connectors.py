# SPDX-License-Identifier: Apache-2.0
"""The connector on an engine's scheduler, by vLLM's own configuration and factory, without an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import vllm_ascend_pd

NAME = "LayerwisePushConnector"


def config_of(model: Path, transfer: dict[str, Any], **options: Any) -> VllmConfig:
    """Returns the configuration of an engine. `transfer`: what its `kv_transfer_config` says besides our name."""
    vllm_ascend_pd.register()
    whole = KVTransferConfig(**{"kv_connector": NAME, "engine_id": "an-engine", **transfer})
    args = EngineArgs(model=str(model), enforce_eager=True, max_model_len=512, kv_transfer_config=whole, **options)
    return args.create_engine_config()


def full_attention(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32, **changes}
    )


def caches_of(*specs: Any, blocks: int = 8) -> KVCacheConfig:
    """Returns the caches of layers `layer.0`, `layer.1`, and so on, each in a group of its own."""
    groups = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@contextmanager
def scheduler_connector(config: VllmConfig, caches: KVCacheConfig | None = None) -> Iterator[Any]:
    """Yields the connector as vLLM's scheduler has it, by default with one layer of full attention."""
    caches = caches or caches_of(full_attention())
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
    try:
        yield connector
    finally:
        connector.shutdown()
