# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: runs the tests of torch_npu on the emulated CANN libraries, where they have been built.

It must be imported before torch is. Without the libraries it does nothing: the tests run on real NPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import cann_on_host

if cann_on_host.is_available():
    cann_on_host.activate()
    os.environ.setdefault("HCCL_RDMA_TIMEOUT", "10")  # else a transfer to a silent peer takes 34 s or more

_passed = 0


def pytest_report_header() -> str:
    return f"CANN: {'emulated, ' + str(cann_on_host.library_folder()) if cann_on_host.is_active() else 'real'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if cann_on_host.is_active():
        return
    skip = pytest.mark.skip(reason="about the emulated CANN libraries; this is real hardware")
    for item in items:
        if item.get_closest_marker("emulated"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_faults_left() -> Iterator[None]:
    yield
    if cann_on_host.is_active():
        cann_on_host.clear_faults()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _passed
    if report.when == "call" and report.passed and "npu" in report.keywords:
        _passed += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _passed:
        where = "emulated CANN" if cann_on_host.is_active() else "real NPUs"
        terminalreporter.write_line(f"{_passed} tests passed on {where}")
