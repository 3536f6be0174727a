# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM get the patches that a decode engine's scheduler needs.

What the patches do is shown by `tests/integration/test_decode_pressure.py` and `test_decode_pressure_at_random.py`.
"""

import pytest
import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ascend_pd.connector import patches
from vllm_ascend_pd.core.config import ConfigError


def test_a_scheduler_that_no_patch_fits_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests could wait forever there. vLLM 0.32 and 0.33 are such versions."""
    monkeypatch.delattr(Scheduler, "_select_waiting_queue_for_scheduling")
    with pytest.raises(ConfigError, match=f"vLLM {vllm.__version__} schedules requests in a way"):
        patches.install_for_decode_scheduler()
