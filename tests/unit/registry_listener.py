# SPDX-License-Identifier: Apache-2.0
"""Records what an engine registry reports to its listeners."""

from __future__ import annotations

from vllm_ascend_pd.proxy.routing.registry import RegisteredEngine


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
