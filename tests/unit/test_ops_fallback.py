# SPDX-License-Identifier: Apache-2.0
"""Missing builds: the import error without the compiled ops, and what an NPU runs without its kernels."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from op_calls import INTERLEAVE, random_tensor

from vllm_ascend_pd.device import ops, ops_fallback


def test_a_missing_build_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm_ascend_pd.device.ops")
    monkeypatch.setitem(sys.modules, "vllm_ascend_pd._C", None)
    with pytest.raises(ImportError, match="pip install --no-build-isolation"):
        importlib.import_module("vllm_ascend_pd.device.ops")


def redispatch_to_npu(op: str, **kwargs: Any) -> None:
    """Calls what is registered for NPU tensors, with CPU tensors."""
    overload = getattr(torch.ops.vllm_ascend_pd, op).default
    overload.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1), *kwargs.values())


@pytest.mark.skipif("torch_npu" in sys.modules, reason="the NPU's own ops may be registered")
def test_without_kernels_an_npu_falls_back_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    src = random_tensor((128,))
    for _ in range(2):
        out = torch.zeros(128, dtype=torch.uint8)
        redispatch_to_npu("interleave_heads", **INTERLEAVE | {"src": src, "out": out})
        assert torch.equal(out, src.view(2, 8, 8).transpose(0, 1).flatten())
    with pytest.raises(ValueError, match=r"^interleave_heads: ranks is 0"):
        redispatch_to_npu("interleave_heads", **INTERLEAVE | {"ranks": 0})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "kernels of vllm_ascend_pd are not in use (torch_npu was not imported" in caplog.text


def test_the_fallback_refuses_units_off_its_grid() -> None:
    cache = torch.zeros(4, 64, dtype=torch.uint8)
    out = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiples of 64 bytes"):
        ops_fallback.gather_units([cache], torch.tensor([32]), 64, 1, out, 0, 0, 0)


def test_a_library_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ops_fallback, "register", lambda reason: None)
    monkeypatch.setattr(ops, "NPU_LIBRARY", tmp_path / "libvllm_ascend_pd_npu.so")
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    not_built = ops._load_npu_kernels()
    ops.NPU_LIBRARY.write_bytes(b"not a library")
    not_loaded = ops._load_npu_kernels()
    monkeypatch.delitem(sys.modules, "torch_npu")
    no_torch_npu = ops._load_npu_kernels()
    assert "not built" in not_built.reason
    assert f"{ops.NPU_LIBRARY}: file too short" in not_loaded.error
    assert "torch_npu was not imported" in no_torch_npu.reason
