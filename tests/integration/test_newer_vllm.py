# SPDX-License-Identifier: Apache-2.0
"""What the connector uses of vLLM is still there in versions that no vllm-ascend pairs with yet."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "harness" / "vllm_contract.py"
LEFT_ALONE = {
    "bind_kv_cache_manager",
    "clear_connector_metadata",
    "finish_forward",
    "get_external_cache_hit_sources",
    "get_kv_connector_kv_cache_events",
    "get_mem_pool_context",
    "get_required_kvcache_layout",
    "has_connector_metadata",
    "has_pending_block_frees",
    "register_finished_partial_tail",
    "reset_cache",
    "reset_capture_state",
    "set_host_xfer_buffer_ops",
    "take_events",
}
"""Hooks of vLLM that nothing here needs. A hook that a newer vLLM adds is in no list: read what it asks for."""


@pytest.fixture(scope="module", params=["0.32.0", "0.33.0"])
def contract(request: pytest.FixtureRequest) -> dict[str, Any]:
    folder = Path(sys.prefix) / f"vllm-{request.param.removesuffix('.0')}"
    if not folder.is_dir():
        pytest.skip(f"no vLLM {request.param}: scripts/setup_env.sh --with-compat unpacks it")
    result = subprocess.run(
        [sys.executable, PROGRAM],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert found["version"] == request.param
    return found


def test_nothing_is_gone(contract: dict[str, Any]) -> None:
    assert {key: contract[key] for key in ("abstract", "imports", "hooks")} == {
        "abstract": [],
        "imports": [],
        "hooks": [],
    }


def test_hooks_that_are_new(contract: dict[str, Any]) -> None:
    assert set(contract["inherited"]) - LEFT_ALONE == set()


def test_a_decode_engine_refuses_it_by_version(contract: dict[str, Any]) -> None:
    assert contract["version"] in contract["decode"]
