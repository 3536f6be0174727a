# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM get the patches that a decode engine's scheduler needs.

What the patches do is shown by `tests/integration/test_decode_pressure.py` and `test_decode_pressure_at_random.py`.
"""

import pytest
import vllm

from vllm_ascend_pd.connector import patches
from vllm_ascend_pd.connector.patches import vllm_0_23_and_0_30_scheduler, vllm_0_32_scheduler
from vllm_ascend_pd.core.config import ConfigError


def test_a_scheduler_that_no_patch_fits_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests could wait forever there."""
    for each in (vllm_0_23_and_0_30_scheduler, vllm_0_32_scheduler):
        monkeypatch.setattr(each, "fits", lambda scheduler: False)
    with pytest.raises(ConfigError, match=f"vLLM {vllm.__version__} schedules requests in a way"):
        patches.install_for_decode_scheduler()
