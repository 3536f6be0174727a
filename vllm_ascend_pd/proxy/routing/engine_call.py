# SPDX-License-Identifier: Apache-2.0
"""One request of the proxy to the engines of a role, which other parts of the proxy can end."""

from __future__ import annotations

import math
import time

import anyio

from vllm_ascend_pd.proxy.routing.answers import FailureKind


class EngineCall:
    """A request that is in flight at an engine, or waits for one. All its work runs under `scope`.

    `EnginePool.open` sets `engines`, `sent_at` and `work`. `StallWatch` and the metaserver may end the call by
    `cut_short`.
    """

    def __init__(self) -> None:
        self.engines: list[str] = []
        """URLs of the engines asked so far. The last one has the request, or had it."""
        self.sent_at = math.inf
        """When the last engine got the request, on `time.monotonic`'s clock. Infinity: none has."""
        self.work = 0
        """The tokens of that engine's load then (`EngineLoad.tokens`), this request included."""
        self.scope = anyio.CancelScope()
        """Cancelled to end the call."""
        self.cut: tuple[FailureKind, str] | None = None
        """Why `cut_short` ended the call: kind and reason."""
        self.silent_since = time.monotonic()
        """When the engine last sent something, on `time.monotonic`'s clock. Infinity: nothing is expected from it."""

    @property
    def engine(self) -> str:
        """URL of the engine asked last; empty if none was."""
        return self.engines[-1] if self.engines else ""

    @property
    def begun(self) -> bool:
        """Whether the engine has begun with the request, so that no other may get it."""
        return False

    @property
    def may_stall(self) -> bool:
        """Whether the engine itself has to compute something for this call now."""
        return True

    def heard(self) -> None:
        """Notes that the engine sent something, and that more is expected."""
        self.silent_since = time.monotonic()

    def pause(self) -> None:
        """Expects nothing from the engine until `heard` is called."""
        self.silent_since = math.inf

    def cut_short(self, kind: FailureKind, reason: str) -> None:
        """Ends the call as failed. Only the first reason counts."""
        if self.cut is None:
            self.cut = (kind, reason)
            self.scope.cancel()
