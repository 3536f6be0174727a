# SPDX-License-Identifier: Apache-2.0
"""An engine ends and says why if the transfer engine cannot register its memory."""

import dataclasses
import tempfile
from pathlib import Path

import pytest

from faults.world import DECODE
from harness.engines import running_engines
from harness.models import TINY, make_model
from harness.processes import StartupError


@pytest.mark.long
@pytest.mark.timeout(600)
def test_memory_that_cannot_be_registered(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pd-faults-") as control:
        env = (("VLLM_ASCEND_PD_TEST_CONTROL", control), ("VLLM_ASCEND_PD_TEST_REFUSE_MEMORY", "1"))
        config = dataclasses.replace(DECODE, env=env)
        engines = running_engines(make_model(TINY, tmp_path / "models"), [config], tmp_path)
        with pytest.raises(StartupError, match=r"ended with code [1-9]") as refused, engines:
            pass
    [log] = tmp_path.glob("*.log")
    assert "Mooncake did not register" in log.read_text(), refused.value
