# SPDX-License-Identifier: Apache-2.0
"""At its start, a prefill engine's log names the hosts whose tickets it serves."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import vllm_ascend_pd
from harness.scheduling import BLOCK


@pytest.mark.parametrize(
    ("extra", "named", "not_named"),
    [
        ({}, "10.0.0.0/8", "8.8.8.0/24"),
        ({}, "198.51.0.0/24", "198.51.99.0/24"),  # of a hundred networks, only some are named
        ({"decode_allowlist": ["203.0.113.0/24"]}, "203.0.113.0/24", "10.0.0.0/8"),
    ],
)
def test_prefills_start_names_the_networks_that_it_admits(
    extra: dict[str, Any],
    named: str,
    not_named: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bridges = [SimpleNamespace(address=f"198.51.{n}.7", netmask="255.255.255.0") for n in range(100)]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"bridges": bridges})
    vllm_ascend_pd.register()
    config = EngineArgs(
        model=str(model),
        max_model_len=512,
        kv_transfer_config=KVTransferConfig(
            kv_connector="LayerwisePushConnector", kv_role="kv_producer", kv_connector_extra_config=extra
        ),
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    shown = logging.getLogger("vllm")  # what an engine shows
    monkeypatch.setattr(shown, "handlers", [*shown.handlers, caplog.handler])
    KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches).shutdown()
    # Once or twice, as vLLM's logger may hand records on.
    [said] = {text for record in caplog.records if "decode engines are served at" in (text := record.getMessage())}
    assert named in said
    assert not_named not in said
    assert len(said) < 1000
