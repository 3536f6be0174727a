# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.23 on one side and 0.30 on the other answer as a single engine of 0.30 does, and prefill's KV is what decode
uses. tests/npu/e2e/test_versions.py has vllm-ascend's versions.
"""

import dataclasses

import pytest

from harness.client import Client, random_prompt
from harness.clusters import PLAIN, Cluster, ClusterConfig, one_to_one
from harness.pool import long
from harness.versions import assert_versions_answer_as_one_engine, of_0_23


def of_two_versions(prefill_tp: int, prefill: str, decode: str) -> ClusterConfig:
    config = one_to_one(prefill_tp, 1)
    sides = {"prefill": (prefill, config.prefill), "decode": (decode, config.decode)}
    changed = {role: (of_0_23(side),) for role, (version, (side,)) in sides.items() if version == "0.23.0"}
    return dataclasses.replace(config, name=f"{prefill}-to-{decode}", single=PLAIN, **changed)


CLUSTERS = [of_two_versions(2, "0.23.0", "0.30.0"), long(of_two_versions(1, "0.30.0", "0.23.0"))]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)
@pytest.mark.timeout(600)  # it starts the cluster
def test_two_versions_answer_as_one_engine(cluster: Cluster, client: Client, reference) -> None:
    assert_versions_answer_as_one_engine(cluster, cluster.config.name.split("-to-"), client, reference)
    prompt = random_prompt(1000, "versions-bytes")
    completion = client.complete(prompt)
    assert completion.token_ids == reference.complete(prompt)
    assert completion.kv_transfer_params["received_bytes"] == 8 * 128 * cluster.config.model.kv_bytes_per_token
