# SPDX-License-Identifier: Apache-2.0
"""Attacks on real engines with the cluster's secret, by those who do not have it."""

import pytest

from harness.attacks import HOST, Target, attack, identities, running
from harness.client import Client, random_prompt
from harness.clusters import Cluster, ClusterConfig
from harness.pool import ClusterPool, Reference

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster(secured: ClusterConfig, cluster_pool: ClusterPool) -> Cluster:
    return cluster_pool.get(secured)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_stranger_with_forged_identities_ends_no_engine(
    cluster: Cluster, client: Client, reference: Reference, side: str
) -> None:
    """Without a secret, these connections end a process that listens (tests/hostile/test_attacks.py)."""
    [engine] = getattr(cluster, side)
    asked = random_prompt(300, f"beside an attack on {side}")
    with running(attack, identities, Target(f"tcp://{HOST}:{engine.kv_port}")):
        assert client.complete(asked).token_ids == reference.complete(asked)
    assert engine.process.exit_code is None
    again = random_prompt(300, f"after an attack on {side}")
    assert client.complete(again).token_ids == reference.complete(again)
