# SPDX-License-Identifier: Apache-2.0
"""Missing builds: the import error without the compiled ops, and what an NPU runs without its kernels."""

import importlib
import sys

import pytest
import torch

from vllm_ascend_pd.device import ops_fallback


def test_a_missing_build_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm_ascend_pd.device.ops")
    monkeypatch.setitem(sys.modules, "vllm_ascend_pd._C", None)
    with pytest.raises(ImportError, match="pip install --no-build-isolation"):
        importlib.import_module("vllm_ascend_pd.device.ops")


def test_the_fallback_refuses_units_off_its_grid() -> None:
    cache = torch.zeros(4, 64, dtype=torch.uint8)
    out = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiples of 64 bytes"):
        ops_fallback.gather_units([cache], torch.tensor([32]), 64, 1, out, 0, 0, 0)
