# SPDX-License-Identifier: Apache-2.0
"""Real engines for the end-to-end tests.

Starting a cluster takes the better part of a minute, so the tests that use the same one follow each other, and
it runs until a test needs another one: two cores carry no more than one cluster and the idle reference.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.client import Client, Completion, Messages, Prompt
from harness.engines import Cluster, ClusterConfig, EngineConfig, running_cluster, running_engines
from harness.models import TINY, make_model
from harness.processes import StartupError, interrupt_on_sigterm


def pytest_configure() -> None:
    interrupt_on_sigterm()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of one cluster configuration one after the other, in the order of their first use."""
    ranks: dict[ClusterConfig | None, int] = {None: 0}

    def rank(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        config = callspec.params.get("cluster") if callspec else None
        return ranks.setdefault(config, len(ranks))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the end of its servers' logs to a failed test: their folder may be gone when one wants to read it."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        for server in (*cluster.prefill, *cluster.decode, cluster.proxy):
            report.sections.append((f"end of {server.log.name}", server.process.tail()))
    return report


class Reference:
    """A single engine without connector: every cluster's output must equal its own. Remembers its answers."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._answers: dict[str, list[Completion]] = {}

    def complete(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids that follow `prompt`."""
        return self.complete_many([prompt])[0]

    def complete_many(self, prompts: list[Prompt], n: int = 1) -> list[tuple[int, ...]]:
        """The token ids of each choice of `Client.complete_many`."""
        key = repr((prompts, n))
        if key not in self._answers:
            self._answers[key] = self._client.complete_many(prompts, n=n)
        return [completion.token_ids for completion in self._answers[key]]

    def chat(self, messages: Messages) -> tuple[int, ...]:
        key = repr(messages)
        if key not in self._answers:
            self._answers[key] = [self._client.chat(messages)]
        return self._answers[key][0].token_ids


class ClusterPool:
    """The running cluster. Asking for another one stops it."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model = model
        self._logs = logs
        self._running = ExitStack()
        self._cluster: Cluster | None = None
        self._broken: dict[ClusterConfig, str] = {}

    def get(self, config: ClusterConfig) -> Cluster:
        """Return the cluster of `config`, started now unless it runs already."""
        if config in self._broken:
            pytest.fail(f"{config} did not start for an earlier test: {self._broken[config]}")
        if self._cluster is None or self._cluster.config != config:
            self.stop()
            try:
                self._cluster = self._running.enter_context(running_cluster(self._model, config, self._logs))
            except StartupError as error:
                self._broken[config] = str(error).partition("\n")[0]
                raise
        return self._cluster

    def stop(self) -> None:
        self._cluster = None
        self._running.close()


@pytest.fixture(scope="session")
def engine_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reference(tiny_model: Path, engine_logs: Path) -> Iterator[Reference]:
    """The single engine, idle while nothing is asked that it has not answered before."""
    with running_engines(tiny_model, [EngineConfig()], engine_logs) as [engine], Client(engine.url) as client:
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
