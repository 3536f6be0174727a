# SPDX-License-Identifier: Apache-2.0
"""A pool that a MultiConnector asks before ours on decode: the doctor says so."""

import json
from typing import Any

import pytest

from vllm_ascend_pd.connector.setup import asked_before
from vllm_ascend_pd.tools.doctor import configuration
from vllm_ascend_pd.tools.doctor.report import Level

OURS = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer"}
POOL = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_consumer"}


@pytest.mark.parametrize(
    ("connectors", "before"),
    [
        ([OURS, POOL], []),
        ([POOL, OURS], ["AscendStoreConnector"]),
        ([POOL, POOL, OURS], ["AscendStoreConnector"] * 2),
        ([POOL], []),
        ("what", []),
        (["what", OURS], ["?"]),
    ],
)
def test_connectors_that_are_asked_first(connectors: Any, before: list[str]) -> None:
    assert asked_before("MultiConnector", {"connectors": connectors}) == before
    assert asked_before("AnotherConnector", {"connectors": connectors}) == []


@pytest.mark.parametrize(
    ("kv_role", "connectors", "level"),
    [
        ("kv_consumer", [POOL, OURS], Level.WARNING),
        ("kv_consumer", [OURS, POOL], None),
        ("kv_producer", [POOL, {**OURS, "kv_role": "kv_producer"}], None),
    ],
)
def test_the_doctor_says_it(kv_role: str, connectors: list[dict[str, str]], level: Level | None) -> None:
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"connectors": connectors},
    }
    findings, _ = configuration.judge(configuration.read(json.dumps(given)))
    assert [finding.level for finding in findings if finding.check == "config.order"] == ([level] if level else [])
