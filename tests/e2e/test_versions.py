# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.32 on both sides, or 0.23 on one and 0.30 on the other, answer as a single engine of 0.30 does, and prefill's
KV is what decode uses. tests/npu/e2e/test_versions.py has vllm-ascend's versions.
"""

import dataclasses

import pytest

from harness.client import Client, random_prompt
from harness.clusters import PLAIN, Cluster, ClusterConfig, one_to_one
from harness.pool import long
from harness.versions import assert_versions_answer_as_one_engine, of_0_23, of_0_32

CHANGES = {"0.23.0": of_0_23, "0.30.0": lambda installed: installed, "0.32.0": of_0_32}


def of_versions(prefill_tp: int, prefill: str, decode: str) -> ClusterConfig:
    config = one_to_one(prefill_tp, 1)
    return dataclasses.replace(
        config,
        name=f"{prefill}-to-{decode}",
        single=PLAIN,
        prefill=(CHANGES[prefill](config.prefill[0]),),
        decode=(CHANGES[decode](config.decode[0]),),
    )


CLUSTERS = [
    of_versions(2, "0.32.0", "0.32.0"),
    long(of_versions(2, "0.23.0", "0.30.0")),
    long(of_versions(1, "0.30.0", "0.23.0")),
]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str, indirect=True)
@pytest.mark.timeout(600)  # it starts the cluster
def test_versions_answer_as_one_engine(cluster: Cluster, client: Client, reference) -> None:
    assert_versions_answer_as_one_engine(cluster, cluster.config.name.split("-to-"), client, reference)
    prompt = random_prompt(1000, "versions-bytes")
    completion = client.complete(prompt)
    assert completion.token_ids == reference.complete(prompt)
    assert completion.kv_transfer_params["received_bytes"] == 8 * 128 * cluster.config.model.kv_bytes_per_token
