# SPDX-License-Identifier: Apache-2.0
"""Tests on torch_npu: on an Ascend machine with its NPUs, elsewhere with the emulated CANN libraries in the
environment that scripts/setup_npu_emulation.sh makes. Without torch_npu there is nothing to collect here."""

import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from harness.ranks import MakePair
    from kernel_builds import Builds

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "cann_on_host"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "ascendc_twin"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

HAS_TORCH_NPU = find_spec("torch_npu") is not None

if not HAS_TORCH_NPU:
    collect_ignore_glob = ["*"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "npu: needs torch_npu, on NPUs or on the emulated CANN libraries")
    config.addinivalue_line("markers", "emulated: about the emulated CANN libraries themselves")
    if HAS_TORCH_NPU and not config.pluginmanager.has_plugin("cann_on_host_pytest"):
        config.pluginmanager.import_plugin("cann_on_host_pytest")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """vllm-ascend sets variables where a configuration is made. With its PYTORCH_NPU_ALLOC_CONF, processes of later
    tests would take memory that they do not use."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def make_pair() -> "Iterator[MakePair]":
    from harness.ranks import made_pairs

    with made_pairs() as make:
        yield make


@pytest.fixture(scope="session")
def builds() -> Iterator["Builds"]:
    """Builds of the NPU's library with the regroup kernels for the host, in a folder that every user may read.

    TMPDIR may be a folder that only its owner may enter, and its name may have hyphens (`Builds.toolkit`).
    """
    from kernel_builds import Builds

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Builds(Path(folder))


@pytest.fixture(scope="session")
def kernels(builds: "Builds") -> Path:
    """The NPU's library with the regroup kernels, built for the host."""
    return builds["find_package(ASC)"].library
