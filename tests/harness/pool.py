# SPDX-License-Identifier: Apache-2.0
"""Real engines shared by end-to-end tests: one cluster at a time, and the single engine it is compared with."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.client import Client, Completion, Messages, Prompt
from harness.engines import Cluster, ClusterConfig, running_cluster
from harness.processes import StartupError


def sort_by_cluster(items: list[pytest.Item]) -> None:
    """Puts tests of one cluster configuration one after the other, in the order of their first use."""
    ranks: dict[ClusterConfig | None, int] = {None: 0}

    def rank(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        config = callspec.params.get("cluster") if callspec else None
        return ranks.setdefault(config, len(ranks))

    items.sort(key=rank)


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
