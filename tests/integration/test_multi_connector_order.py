# SPDX-License-Identifier: Apache-2.0
"""A pool that a MultiConnector asks before ours on decode: the engine and the doctor say so."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import vllm_ascend_pd
from harness.engines import Role
from harness.multi_connector import TP, transfer_config
from harness.scheduling import BLOCK
from vllm_ascend_pd.connector.setup import asked_before
from vllm_ascend_pd.tools.doctor import configuration
from vllm_ascend_pd.tools.doctor.report import Level

OURS = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer"}
POOL = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_consumer"}


@pytest.mark.parametrize(
    ("kv_role", "ours_first", "warns"),
    [("kv_consumer", False, True), ("kv_consumer", True, False), ("kv_producer", False, False)],
)
def test_a_pool_before_ours_on_decode_is_said_at_the_start(
    kv_role: str, ours_first: bool, warns: bool, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_ascend_pd.register()
    transfer = transfer_config(Role(kv_role), ours_first, tmp_path)
    config = EngineArgs(
        model=str(model),
        enforce_eager=True,
        max_model_len=512,
        tensor_parallel_size=TP,
        kv_transfer_config=KVTransferConfig(**transfer, engine_id="an-engine"),
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with caplog.at_level(logging.WARNING, "vllm_ascend_pd"), set_current_vllm_config(config):  # as vLLM's workers do
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
    said = [record.getMessage() for record in caplog.records if "MultiConnector asks" in record.getMessage()]
    assert len(said) == warns
    assert all("Put LayerwisePushConnector first" in each for each in said)


@pytest.mark.parametrize(
    ("connectors", "before"),
    [
        ([OURS, POOL], []),
        ([POOL, OURS], ["AscendStoreConnector"]),
        ([POOL, POOL, OURS], ["AscendStoreConnector"] * 2),
        ([POOL], []),
        ("what", []),
        (["what", OURS], ["?"]),
    ],
)
def test_connectors_that_are_asked_first(connectors: Any, before: list[str]) -> None:
    assert asked_before("MultiConnector", {"connectors": connectors}) == before
    assert asked_before("AnotherConnector", {"connectors": connectors}) == []


@pytest.mark.parametrize(
    ("kv_role", "connectors", "level"),
    [
        ("kv_consumer", [POOL, OURS], Level.WARNING),
        ("kv_consumer", [OURS, POOL], None),
        ("kv_producer", [POOL, {**OURS, "kv_role": "kv_producer"}], None),
    ],
)
def test_the_doctor_says_it(kv_role: str, connectors: list[dict[str, str]], level: Level | None) -> None:
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"connectors": connectors},
    }
    findings, _ = configuration.judge(configuration.read(json.dumps(given)))
    assert [finding.level for finding in findings if finding.check == "config.order"] == ([level] if level else [])
