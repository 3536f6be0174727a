# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the fault injection, and its report. `FAULTS_REPORT`: a folder to write the table to."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.report import Report
from faults.world import Worlds
from harness.cluster_fixtures import forked_engines  # noqa: F401
from harness.processes import interrupt_on_sigterm

_report = Report()


def pytest_configure(config: pytest.Config) -> None:
    interrupt_on_sigterm()


def pytest_terminal_summary() -> None:
    if not _report.rows:
        return
    print(_report.markdown())
    if folder := os.environ.get("FAULTS_REPORT"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "faults.md").write_text(_report.markdown())


@pytest.fixture(scope="session")
def report() -> Report:
    return _report


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    made = Worlds(tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the end of its servers' logs to a failed test."""
    report = yield
    worlds = getattr(item, "funcargs", {}).get("worlds")
    world = worlds._world if worlds is not None else None
    if report.failed and world is not None:
        for server in world.servers:
            report.sections.append((f"end of {server.log.name}", server.process.tail()))
    return report
