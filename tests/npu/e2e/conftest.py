# SPDX-License-Identifier: Apache-2.0
"""Real vllm-ascend engines, behind our proxy, on NPUs or on the emulated CANN libraries."""

import pytest

from harness.cluster_fixtures import *  # noqa: F403
from harness.engines import EngineConfig
from npu_engines import on_npu


@pytest.fixture(scope="session")
def single_engine() -> EngineConfig:
    return on_npu(EngineConfig())
