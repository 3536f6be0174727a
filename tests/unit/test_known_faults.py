# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend 0.23.0 with data parallelism on decode: the doctor warns, and so does the start of an engine, as
tests/integration/test_said_at_start.py shows."""

import json
import logging
from importlib.metadata import PackageNotFoundError

import anyio
import pytest

from vllm_ascend_pd.connector import model as known_faults
from vllm_ascend_pd.connector.model import overwrites_blocks, warn_of_known_faults
from vllm_ascend_pd.tools.doctor import command, engine_config, loading, loopback, npus, versions
from vllm_ascend_pd.tools.doctor.finding import DoctorReport, Finding, Level, ok
from vllm_ascend_pd.tools.doctor.tools import Ran

CASES = [
    ("0.23.0", 2, True),
    ("0.23.0+local", 2, True),
    ("0.23.0", 1, False),
    ("0.23.0.post1", 2, False),
    ("0.30.0", 2, False),
    (None, 2, False),
]


@pytest.mark.parametrize(("installed", "data_parallel", "warns"), CASES)
def test_idle_ranks_that_overwrite_blocks_are_warned_of(
    installed: str | None,
    data_parallel: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def version(name: str) -> str:
        assert name == "vllm-ascend"
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(known_faults, "version", version)
    found = {} if installed is None else {"vllm-ascend": installed}
    monkeypatch.setattr(versions, "installed_versions", lambda: found)
    assert overwrites_blocks(installed, data_parallel) is warns
    with caplog.at_level(logging.WARNING, "vllm_ascend_pd"):
        warn_of_known_faults(data_parallel)
    assert bool(caplog.records) is warns
    given = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer"}
    machine = command.Machine(engine_config.read(json.dumps(given)), None, data_parallel, ())
    assert [f.check for f in command.judge_data_parallel(machine)] == (["versions.vllm-ascend-dp"] if warns else [])


def test_the_doctor_warns_when_it_examines_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> Ran:
        return Ran("", "", "is not installed")

    async def nothing_loaded() -> tuple[list[loading.Loaded], Ran]:
        return [], await nothing()

    async def no_transfer(way: object) -> Finding:
        return ok("transfer.loopback", "not tried")

    monkeypatch.setattr(npus, "look", nothing)
    monkeypatch.setattr(loading, "load_all", nothing_loaded)
    monkeypatch.setattr(loopback, "check", no_transfer)
    monkeypatch.setattr(versions, "installed_versions", lambda: {"vllm-ascend": "0.23.0"})
    given = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer"}

    def report(data_parallel: int) -> DoctorReport:
        machine = command.Machine(engine_config.read(json.dumps(given)), None, data_parallel, ())
        return anyio.run(command.examine, machine)

    [found] = [finding for finding in report(2).findings if finding.check == "versions.vllm-ascend-dp"]
    assert (found.level, found.found) == (Level.WARNING, known_faults.IDLE_RANKS_OVERWRITE_BLOCKS)
    assert "versions.vllm-ascend-dp" not in {finding.check for finding in report(1).findings}
