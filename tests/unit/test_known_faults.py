# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend 0.23.0 with data parallelism on decode: the doctor warns, and so does the start of an engine, as
tests/integration/test_said_at_start.py shows."""

import json
import logging
from importlib.metadata import PackageNotFoundError

import pytest

from vllm_ascend_pd.connector import model
from vllm_ascend_pd.connector.model import overwrites_blocks, warn_of_known_faults
from vllm_ascend_pd.tools.doctor import command, configuration, loading, loopback, npus, versions
from vllm_ascend_pd.tools.doctor.process import Ran
from vllm_ascend_pd.tools.doctor.report import DoctorReport, Level, ok

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

    monkeypatch.setattr(model, "version", version)
    assert overwrites_blocks(installed, data_parallel) is warns
    with caplog.at_level(logging.WARNING, "vllm_ascend_pd"):
        warn_of_known_faults(data_parallel)
    assert bool(caplog.records) is warns
    given = configuration.read(json.dumps({"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer"}))
    findings = configuration.judge_data_parallel(given, data_parallel, installed)
    assert [finding.check for finding in findings] == (["versions.vllm-ascend-dp"] if warns else [])


def test_the_doctor_warns_when_it_examines_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npus, "run", lambda *_: Ran("", "", "cannot be started"))
    monkeypatch.setattr(loading, "check", list)
    monkeypatch.setattr(loopback, "check", lambda _: [ok("transfer.loopback", "not tried")])
    monkeypatch.setattr(versions, "installed_versions", lambda: {"vllm-ascend": "0.23.0"})
    given = json.dumps({"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer"})

    def report(data_parallel: int) -> DoctorReport:
        return command.read_machine(given, data_parallel=data_parallel).examine()

    [found] = [finding for finding in report(2).findings if finding.check == "versions.vllm-ascend-dp"]
    assert (found.level, found.found) == (Level.WARNING, model.IDLE_RANKS_OVERWRITE_BLOCKS)
    assert "versions.vllm-ascend-dp" not in {finding.check for finding in report(1).findings}
