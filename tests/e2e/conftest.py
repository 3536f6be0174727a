# SPDX-License-Identifier: Apache-2.0
"""Real engines for the end-to-end tests.

Starting a cluster takes the better part of a minute, so the tests that use the same one follow each other, and
it runs until a test needs another one: two cores carry no more than one cluster and the idle reference.
"""

import pytest
from secured import Files, make_files, secured_cluster

from harness.client import Client
from harness.cluster_fixtures import *  # noqa: F403
from harness.clusters import PLAIN, ClusterConfig
from harness.engines import EngineConfig


@pytest.fixture(scope="session")
def single_engine() -> EngineConfig:
    return PLAIN


@pytest.fixture
def prefill_computes(client: Client) -> None:
    """Prefill computes the client's prompts, also those that decode would compute itself."""
    client.http.headers["X-Who-Computes"] = "prefill"


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of the cluster `secured`."""
    return make_files(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="session")
def secured(files: Files) -> ClusterConfig:
    return secured_cluster(files)
