# SPDX-License-Identifier: Apache-2.0
"""pytest hooks and fixtures of every suite that starts engines: a conftest imports all of them, and adds
`single_engine`, the `EngineConfig` of the engine that clusters are compared with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.client import Client
from harness.engines import Cluster, EngineConfig, running_engines
from harness.models import TINY, make_model
from harness.pool import ClusterPool, Reference, sort_by_cluster
from harness.processes import interrupt_on_sigterm


def pytest_configure() -> None:
    interrupt_on_sigterm()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sort_by_cluster(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the end of its servers' logs to a failed test: their folder may be gone when one wants to read it."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        for server in (*cluster.prefill, *cluster.decode, cluster.proxy):
            report.sections.append((f"end of {server.log.name}", server.process.tail()))
    return report


@pytest.fixture(scope="session")
def engine_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reference(single_engine: EngineConfig, tiny_model: Path, engine_logs: Path) -> Iterator[Reference]:
    """The single engine, idle while nothing is asked that it has not answered before."""
    with running_engines(tiny_model, [single_engine], engine_logs) as [engine], Client(engine.url) as client:
        yield Reference(client)


@pytest.fixture(scope="session")
def cluster_pool(tiny_model: Path, engine_logs: Path) -> Iterator[ClusterPool]:
    pool = ClusterPool(tiny_model, engine_logs)
    yield pool
    pool.stop()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, cluster_pool: ClusterPool) -> Cluster:
    """The running cluster of a `ClusterConfig`: parametrize it with `indirect=True`."""
    return cluster_pool.get(request.param)


@pytest.fixture
def client(cluster: Cluster, tiny_model: Path) -> Iterator[Client]:
    """Talks to the cluster's proxy."""
    with Client(cluster.url, model=str(tiny_model)) as client:
        yield client
