# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend 0.23.0 with data parallelism on decode: the start of an engine and the doctor warn."""

import json
import logging
from importlib.metadata import PackageNotFoundError

import pytest

from vllm_ascend_pd.connector import known_faults
from vllm_ascend_pd.connector.known_faults import overwrites_blocks, warn_of_known_faults
from vllm_ascend_pd.tools.doctor import command, engine_config, versions

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
