# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend 0.23.0 with data parallelism on decode: the start of an engine warns, as
tests/integration/test_said_at_start.py shows."""

import logging
from importlib.metadata import PackageNotFoundError

import pytest

from vllm_ascend_pd.connector import model
from vllm_ascend_pd.connector.model import overwrites_blocks, warn_of_known_faults

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
