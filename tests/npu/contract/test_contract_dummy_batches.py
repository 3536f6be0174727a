# SPDX-License-Identifier: Apache-2.0
"""Dummy batches of idle data-parallel ranks leave the KV blocks of running requests alone, as from 0.23.0.post1 on."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import offline_dummy_batch
from harness.engines import CPU_ENV
from vllm_ascend_pd.tools.doctor.versions import NPU

pytestmark = pytest.mark.npu


def test_the_installed_vllm_ascend_is_the_one_that_is_pinned() -> None:
    from vllm_ascend import _version

    assert version("vllm-ascend") == _version.__version__ == NPU.pins["vllm-ascend"]


@pytest.mark.long
def test_dummy_batches_have_no_slots_of_running_requests(dense_model: Path) -> None:
    command = [sys.executable, offline_dummy_batch.__file__, str(dense_model)]
    ran = subprocess.run(command, env=os.environ | CPU_ENV, capture_output=True, text=True, timeout=500)
    printed = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert printed, ran.stderr[-4000:]
    seen = json.loads(printed[-1].removeprefix("RESULT "))
    assert seen["written"]
    assert all(slot >= 0 for slot in seen["before"]), "no request was running: the test shows nothing"
    assert seen["built"], "a dummy batch builds no attention metadata"
    assert all(slot == -1 for slots in seen["built"] for slot in slots), (
        "backends that copy slots write a dummy batch's KV to the blocks of running requests"
    )
    assert seen["unchanged"], "a dummy batch writes to KV caches"
