# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend 0.30 with vLLM 0.30 on one side or on both, and 0.23 on the other.

They answer as a single engine of 0.23 does.
"""

import dataclasses
import os
import sys
from pathlib import Path

import httpx
import pytest

from harness.agreement import assert_agree
from harness.client import Client, at_once, random_prompt
from harness.clusters import Cluster
from harness.engines import PATIENT, PLUGINS, EngineConfig, Role
from harness.pool import long
from npu_engines import cluster_of

PROMPT_TOKENS = (1, 127, 128, 129, 700, 2500)

NEXT = Path(sys.prefix) / "vllm-0.30"
"""Where scripts/setup_npu_emulation.sh puts vLLM 0.30 and vllm-ascend 0.30."""
PREFILL = EngineConfig(Role.PREFILL, connector_extra=PATIENT)
DECODE = EngineConfig(Role.DECODE, connector_extra=PATIENT)


def of_0_30(config: EngineConfig, tp: int = 1) -> EngineConfig:
    path = os.pathsep.join(filter(None, [str(NEXT), str(PLUGINS), os.environ.get("PYTHONPATH")]))
    return dataclasses.replace(config, tp=tp, env=(*config.env, ("PYTHONPATH", path)))


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
    versions = [httpx.get(f"{engine.url}/version").json()["version"] for engine in (*cluster.prefill, *cluster.decode)]
    assert versions == ["0.30.0" if side.startswith("0.30") else "0.23.0" for side in cluster.config.name.split("-to-")]
    prompts = [random_prompt(tokens, "versions") for tokens in PROMPT_TOKENS]
    assert_agree(reference, prompts, at_once(client.complete, prompts, concurrency=4))
    again = [client.complete(prompt) for prompt in prompts]  # with what both sides have cached
    assert_agree(reference, prompts, again)
