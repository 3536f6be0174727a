# SPDX-License-Identifier: Apache-2.0
"""What a request has at an engine: a run that can be cut short from here."""

from __future__ import annotations

import math
import time

import anyio

from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind


class EngineCall:
    """One attempt at the engines of a role. All its work there runs under `scope`."""

    def __init__(self) -> None:
        self.engines: list[str] = []
        """Engines that were asked; the last one has, or had, the request."""
        self.scope = anyio.CancelScope()
        """Of the request to them."""
        self.cut: tuple[FailureKind, str] | None = None
        """Why that was ended from here: its engine does not say what is wrong."""
        self.silent_since = time.monotonic()
        """Since when nothing has come from the engine, on `time.monotonic`'s clock; infinity: nothing is expected."""

    @property
    def engine(self) -> str:
        return self.engines[-1] if self.engines else ""

    @property
    def may_stall(self) -> bool:
        """Whether the engine itself has to compute something for this run."""
        return True

    def heard(self) -> None:
        """Something has come from the engine, and more is expected."""
        self.silent_since = time.monotonic()

    def pause(self) -> None:
        """Nothing is expected from the engine until `heard` is called."""
        self.silent_since = math.inf

    def cut_short(self, kind: FailureKind, reason: str) -> None:
        if self.cut is None:
            self.cut = (kind, reason)
            self.scope.cancel()
