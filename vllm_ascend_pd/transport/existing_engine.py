# SPDX-License-Identifier: Apache-2.0
"""A Mooncake engine that other connectors of this process use, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vllm_ascend_pd.core.regions import Region


class ExistingEngine(Protocol):
    """What `TransferEngine` needs of such an engine. Any thread may call these methods, one at a time."""

    def export_settings(self) -> None:
        """Put the settings of an engine that already runs into the environment, where they are missing.

        Call it before other settings are exported: they have no effect on a running engine.
        """

    def start(self, host: str) -> Any:
        """Return the Mooncake engine, started at `host` unless it runs. Raises RuntimeError if it does not start."""

    def register_caches(self, regions: Sequence[Region]) -> None:
        """Register this process's KV caches, unless another connector has. They stay registered.

        Raises RuntimeError if Mooncake refuses them.
        """
