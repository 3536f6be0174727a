# SPDX-License-Identifier: Apache-2.0
"""Engine registries, and a record of what they tell their limiter and their prefix affinity."""

from __future__ import annotations

from typing import cast

from proxied import settings_with

from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.concurrency import ConcurrencyLimiter
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry
from vllm_ascend_pd.proxy.routing.strategies import PrefixAffinity


class RegistryListener:
    def __init__(self) -> None:
        self.opened: list[RegisteredEngine] = []
        self.closed: list[RegisteredEngine] = []
        self.forgotten: list[str] = []

    def engine_opened(self, engine: RegisteredEngine) -> None:
        self.opened.append(engine)

    def engine_closed(self, engine: RegisteredEngine) -> None:
        self.closed.append(engine)

    def forget(self, url: str) -> None:
        self.forgotten.append(url)


def registry(
    role: EngineRole, listener: RegistryListener | None = None, limiter: ConcurrencyLimiter | None = None, **limits: int
) -> EngineRegistry:
    """An empty registry. `listener` is its limiter and its prefix affinity."""
    if listener is None:
        return EngineRegistry(role, limiter or ConcurrencyLimiter(None, 0, 0.0), settings_with(**limits))
    engines = EngineRegistry(role, cast(ConcurrencyLimiter, listener), settings_with(**limits))
    engines.affinity = cast(PrefixAffinity, listener)
    return engines
