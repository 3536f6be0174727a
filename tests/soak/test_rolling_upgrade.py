# SPDX-License-Identifier: Apache-2.0
"""A rolling upgrade under load: every engine from vLLM 0.23 to 0.30, then both proxies, one after another.

As docs/operations.md and docs/proxy.md say it is done. No request fails, and each has a single engine's tokens.
"""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness.engines import PATIENT, EngineConfig, Role
from harness.plain_http import PLAIN_HTTP
from harness.prefork import METHOD
from harness.rolling import RollingCluster, cluster_under_load
from harness.versions import of_0_23

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

PREFILL = EngineConfig(Role.PREFILL, connector_extra=PATIENT)
DECODE = EngineConfig(Role.DECODE, connector_extra=PATIENT)


@pytest.fixture
def rolling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RollingCluster]:
    monkeypatch.setenv(METHOD, "fork")  # engines start sooner
    with cluster_under_load("rolling", of_0_23(PREFILL), of_0_23(DECODE), tmp_path) as made:
        yield made


def versions(rolling: RollingCluster) -> set[str]:
    return {httpx.get(f"{engine.url}/version", **PLAIN_HTTP).json()["version"] for engine in rolling.engines}


def test_engines_and_proxies_are_upgraded_under_load(rolling: RollingCluster) -> None:
    assert versions(rolling) == {"0.23.0"}
    for engine in rolling.engines:
        engine.environment = PREFILL.environment()
    rolling.restart_all()
    assert versions(rolling) == {"0.30.0"}
