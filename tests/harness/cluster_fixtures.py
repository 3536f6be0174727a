# SPDX-License-Identifier: Apache-2.0
"""pytest hooks and fixtures of every suite that starts engines: a conftest imports all of them, and adds
`single_engine`, the `EngineConfig` of the engine that clusters are compared with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.agreement import listed_logprobs
from harness.client import Client
from harness.clusters import Cluster
from harness.engines import EngineConfig
from harness.pool import ClusterPool, Reference, ReferencePool, sort_by_cluster
from harness.prefork import METHOD
from harness.processes import interrupt_on_sigterm


def pytest_configure(config: pytest.Config) -> None:
    interrupt_on_sigterm()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sort_by_cluster(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds the end of its servers' logs to a failed test, because their folder may be gone later."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        for server in (*cluster.prefill, *cluster.decode, cluster.proxy):
            report.sections.append((f"end of {server.log.name}", server.process.tail()))
    return report


@pytest.fixture(scope="session", autouse=True)
def forked_engines() -> Iterator[None]:
    """Forks engines from a process that has imported vLLM, since importing takes most of the time of a start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(METHOD, "fork")
        yield


@pytest.fixture(scope="session")
def engine_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def reference_pool(models: Path, engine_logs: Path) -> Iterator[ReferencePool]:
    pool = ReferencePool(models, engine_logs)
    yield pool
    pool.stop()


@pytest.fixture
def reference(cluster: Cluster, single_engine: EngineConfig, reference_pool: ReferencePool) -> Reference:
    """The engine whose outputs the cluster's must equal."""
    return reference_pool.get(cluster.config.model, cluster.config.single or single_engine)


@pytest.fixture(scope="session")
def cluster_pool(models: Path, engine_logs: Path) -> Iterator[ClusterPool]:
    pool = ClusterPool(models, engine_logs)
    yield pool
    pool.stop()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, cluster_pool: ClusterPool) -> Cluster:
    """The running cluster of a `ClusterConfig`: parametrize it with `indirect=True`."""
    return cluster_pool.get(request.param)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    """Talks to the cluster's proxy."""
    logprobs = listed_logprobs(cluster.decode[0].config.dtype)
    with Client(cluster.url, model=str(cluster.model), logprobs=logprobs) as client:
        yield client
