# SPDX-License-Identifier: Apache-2.0
"""Real engines shared by end-to-end tests: one cluster at a time, and the single engine it is compared with."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from harness.agreement import listed_logprobs
from harness.client import Client, Completion, Messages, Prompt
from harness.clusters import Cluster, ClusterConfig, running_cluster
from harness.engines import Engine, EngineConfig, running_engines
from harness.models import ModelSpec, make_model
from harness.processes import StartupError


def long(*parameters: object, id: str | None = None) -> ParameterSet:
    """Marks a test that takes long and shows little more than others: only the long forms run it."""
    return pytest.param(*parameters, id=id, marks=pytest.mark.long)


def sort_by_cluster(items: list[pytest.Item]) -> None:
    """Sorts tests by model, then by cluster, in the order of their first use."""
    models: dict[ModelSpec | None, int] = {None: 0}
    clusters: dict[ClusterConfig | None, int] = {None: 0}

    def rank(item: pytest.Item) -> tuple[int, int]:
        callspec = getattr(item, "callspec", None)
        config = callspec.params.get("cluster") if callspec else None
        model = config.model if config else None
        return models.setdefault(model, len(models)), clusters.setdefault(config, len(clusters))

    items.sort(key=rank)


class Reference:
    """A single engine without connector: every cluster's output must equal its own. Remembers its answers."""

    def __init__(self, pool: "ReferencePool", model: ModelSpec, engine: EngineConfig) -> None:
        self._pool = pool
        self._key = (model, engine)
        self._answers: dict[str, list[Completion]] = {}

    def complete(self, prompt: Prompt, max_tokens: int = 16) -> tuple[int, ...]:
        """The token ids that follow `prompt`."""
        return self.complete_many([prompt], max_tokens=max_tokens)[0]

    def answer(self, prompt: Prompt) -> Completion:
        """The whole answer to `prompt`, with log probabilities where the engine rounds (`harness.agreement`)."""
        key = repr(prompt)
        if key not in self._answers:
            self._answers[key] = [self._client.complete(prompt)]
        return self._answers[key][0]

    def complete_many(self, prompts: list[Prompt], n: int = 1, max_tokens: int = 16) -> list[tuple[int, ...]]:
        """The token ids of each choice of `Client.complete_many`."""
        key = repr((prompts, n, max_tokens))
        if key not in self._answers:
            self._answers[key] = self._client.complete_many(prompts, max_tokens, n=n)
        return [completion.token_ids for completion in self._answers[key]]

    def chat(self, messages: Messages) -> tuple[int, ...]:
        key = repr(messages)
        if key not in self._answers:
            self._answers[key] = [self._client.chat(messages)]
        return self._answers[key][0].token_ids

    def shortfall(self, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
        """`Client.shortfall`."""
        return self._client.shortfall(prompt, token_ids)

    @property
    def dtype(self) -> str:
        """What the engine computes in."""
        return self._key[1].dtype

    @property
    def engine(self) -> Engine:
        """The engine itself, running."""
        return self._pool.engine(*self._key)

    @property
    def _client(self) -> Client:
        return self._pool.client(*self._key)


class ReferencePool:
    """The references of all models. Only the one asked last has its engine running, from its first question on."""

    def __init__(self, models: Path, logs: Path) -> None:
        self._models = models
        self._logs = logs
        self._references: dict[tuple[ModelSpec, EngineConfig], Reference] = {}
        self._running = ExitStack()
        self._current: tuple[ModelSpec, EngineConfig] | None = None
        self._engine: Engine
        self._answering: Client

    def get(self, model: ModelSpec, engine: EngineConfig) -> Reference:
        return self._references.setdefault((model, engine), Reference(self, model, engine))

    def engine(self, model: ModelSpec, engine: EngineConfig) -> Engine:
        """The engine, started now unless it runs already."""
        self.client(model, engine)
        return self._engine

    def client(self, model: ModelSpec, engine: EngineConfig) -> Client:
        """Talks to the engine, started now unless it runs already."""
        if self._current != (model, engine):
            self.stop()
            folder = make_model(model, self._models)
            [self._engine] = self._running.enter_context(running_engines(folder, [engine], self._logs))
            self._answering = self._running.enter_context(
                Client(self._engine.url, logprobs=listed_logprobs(engine.dtype))
            )
            self._current = (model, engine)
        return self._answering

    def stop(self) -> None:
        self._current = None
        self._running.close()


class ClusterPool:
    """The running cluster. Asking for another one stops it."""

    def __init__(self, models: Path, logs: Path) -> None:
        self._models = models
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
            folder = make_model(config.model, self._models)
            try:
                self._cluster = self._running.enter_context(running_cluster(folder, config, self._logs))
            except StartupError as error:
                self._broken[config] = str(error).partition("\n")[0]
                raise
        return self._cluster

    def stop(self) -> None:
        self._cluster = None
        self._running.close()
