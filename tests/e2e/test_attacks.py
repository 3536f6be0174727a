# SPDX-License-Identifier: Apache-2.0
"""Attacks on real engines with the cluster's secret, by those who do not have it."""

import dataclasses
from pathlib import Path

import pytest

from harness.attacks import HOST, Target, attack, identities, running
from harness.client import Client, random_prompt
from harness.clusters import Cluster, ClusterConfig, one_to_one
from harness.engines import EngineConfig
from harness.pool import ClusterPool, Reference
from vllm_ascend_pd.transport.secret_files import new_secret, write_new

pytestmark = pytest.mark.timeout(900)


def with_secret(side: EngineConfig, path: Path) -> EngineConfig:
    return dataclasses.replace(side, connector_extra=(*side.connector_extra, ("secret_file", str(path))))


@pytest.fixture(scope="session")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    write_new(path, new_secret())
    return path


@pytest.fixture(scope="session")
def guarded(secret_file: Path) -> ClusterConfig:
    plain = one_to_one(1, 1)
    return dataclasses.replace(
        plain,
        name="secret-tp1-to-tp1",
        prefill=(with_secret(plain.prefill[0], secret_file),),
        decode=(with_secret(plain.decode[0], secret_file),),
        proxy_args=(*plain.proxy_args, "--secret-file", str(secret_file)),
    )


@pytest.fixture
def cluster(guarded: ClusterConfig, cluster_pool: ClusterPool) -> Cluster:
    return cluster_pool.get(guarded)


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
