# SPDX-License-Identifier: Apache-2.0
"""The ways in which an attempt at an engine fails, and which of them count against the engine."""

from __future__ import annotations

import enum


class FailureKind(enum.Enum):
    """How an attempt failed. The value is its name in `/health`."""

    UNREACHABLE = "unreachable"
    """No connection could be made, so nothing was sent. The engines before it in the ranking were unreachable too."""
    LOST = "connection lost"
    """The connection closed before the answer was complete. The engine died, or was closing an idle connection."""
    TIMEOUT = "timeout"
    """The engine stayed silent, did not answer a health probe, or computed nothing for too long."""
    ERROR = "server error"
    """The engine answered with HTTP 5xx, or sent an error in a stream."""
    GARBAGE = "unusable answer"
    """The answer is no completion, or is too long."""
    TRANSFER = "transfer failed"
    """The engine answered, but reports that the KV did not arrive."""
    PREFILL = "prefill failed"
    """Decode only: all attempts at its prefill failed, and no further one is allowed."""
    NO_PREFILL = "no prefill engine"
    """Decode only: no prefill engine was there for its prompt, so decode may be asked to compute that itself."""
    NO_ENGINE = "no engine"
    """All engines have been removed, or drain."""
    FULL = "full"
    """No engine had a free slot in time. Another attempt would wait just as long."""
    REFUSED = "refused"
    """The engine answered with HTTP 4xx. Every other engine would answer the same."""

    @property
    def label(self) -> str:
        """The kind's name in metrics and traces."""
        return self.value.replace(" ", "_")


DECODE_BLAMED = frozenset(
    {FailureKind.UNREACHABLE, FailureKind.LOST, FailureKind.TIMEOUT, FailureKind.ERROR, FailureKind.GARBAGE}
)
"""Failures that count against a decode engine. A transfer failure does not: prefill may have caused it."""
PREFILL_BLAMED = DECODE_BLAMED | {FailureKind.TRANSFER}
"""Failures that count against a prefill engine."""
