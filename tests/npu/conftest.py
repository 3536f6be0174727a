# SPDX-License-Identifier: Apache-2.0
"""Tests on torch_npu: on an Ascend machine with its NPUs, elsewhere with the emulated CANN libraries in the
environment that scripts/setup_npu_emulation.sh makes. Without torch_npu there is nothing to collect here."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "cann_on_host"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

HAS_TORCH_NPU = find_spec("torch_npu") is not None

if not HAS_TORCH_NPU:
    collect_ignore_glob = ["*"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "npu: needs torch_npu, on NPUs or on the emulated CANN libraries")
    config.addinivalue_line("markers", "emulated: about the emulated CANN libraries themselves")
    if HAS_TORCH_NPU and not config.pluginmanager.has_plugin("cann_on_host_pytest"):
        config.pluginmanager.import_plugin("cann_on_host_pytest")


@pytest.fixture(scope="session")
def kernels() -> Iterator[Path]:
    """The NPU's library with the regroup kernels, built for the host."""
    from launches import kernels_on_the_twin

    with kernels_on_the_twin() as library:
        yield library
