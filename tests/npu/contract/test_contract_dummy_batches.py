# SPDX-License-Identifier: Apache-2.0
"""Dummy batches of idle data-parallel ranks leave the KV blocks of running requests alone, as from 0.23.0.post1 on."""

from importlib.metadata import version

import pytest
from vllm_ascend_contract import OfflineEngines

from vllm_ascend_pd.tools.doctor.versions import NPU

pytestmark = pytest.mark.npu


def test_the_installed_vllm_ascend_is_the_one_that_is_pinned() -> None:
    from vllm_ascend import _version

    assert version("vllm-ascend") == _version.__version__ == NPU.pins["vllm-ascend"]


def test_dummy_batches_have_no_slots_of_running_requests(offline: OfflineEngines) -> None:
    seen = offline["dummy_batch"]
    assert seen["written"]
    assert all(slot >= 0 for slot in seen["before"]), "no request was running: the test shows nothing"
    assert seen["built"], "a dummy batch builds no attention metadata"
    assert all(slot == -1 for slots in seen["built"] for slot in slots), (
        "backends that copy slots write a dummy batch's KV to the blocks of running requests"
    )
    assert seen["unchanged"], "a dummy batch writes to KV caches"
