# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend 0.30 with vLLM 0.30 on one side or on both, and 0.23 on the other.

They answer as a single engine of 0.23 does.
"""

import dataclasses
import sys
from pathlib import Path

import pytest

from harness.client import Client
from harness.clusters import Cluster
from harness.engines import PATIENT, EngineConfig, Role
from harness.pool import long
from harness.versions import assert_versions_answer_as_one_engine, with_vllm_in
from npu_engines import cluster_of

NEXT = Path(sys.prefix) / "vllm-0.30"
"""Where scripts/setup_npu_emulation.sh puts vLLM 0.30 and vllm-ascend 0.30."""
PREFILL = EngineConfig(Role.PREFILL, connector_extra=PATIENT)
DECODE = EngineConfig(Role.DECODE, connector_extra=PATIENT)


def of_0_30(config: EngineConfig, tp: int = 1) -> EngineConfig:
    return with_vllm_in(NEXT, dataclasses.replace(config, tp=tp))


CLUSTERS = [
    cluster_of("0.30-to-0.23", [of_0_30(PREFILL)], [DECODE]),
    long(cluster_of("0.23-to-0.30", [PREFILL], [of_0_30(DECODE)])),
    long(cluster_of("0.30-tp2-to-0.30", [of_0_30(PREFILL, tp=2)], [of_0_30(DECODE)])),
]

pytestmark = [
    pytest.mark.npu,
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)
def test_both_versions_answer_as_one_engine(cluster: Cluster, client: Client, reference) -> None:
    versions = ["0.30.0" if side.startswith("0.30") else "0.23.0" for side in cluster.config.name.split("-to-")]
    assert_versions_answer_as_one_engine(cluster, versions, client, reference)
