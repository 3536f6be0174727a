# SPDX-License-Identifier: Apache-2.0
"""Counts of failures and retries since the proxy started, and the last failures."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind

MAX_RECENT = 50
_MAX_REASON_CHARS = 300
_SHOWN_ID_CHARS = 8
"""Enough to find a log line. With the whole id of a running request, a client could post tickets for it."""


class RecentFailure(msgspec.Struct, frozen=True):
    """A failed attempt, for the status page. It contains nothing that a reader of that page must not see."""

    number: int
    """Its number among all failures, from 1."""
    at: float
    """Seconds since 1970."""
    role: EngineRole
    """The role of the engine."""
    engine: str
    """The engine's URL; empty if no engine was asked."""
    kind: FailureKind
    """The kind of failure."""
    reason: str
    """One line, without text from prompts or answers."""
    request: str
    """The beginning of the attempt's request id."""


class FailureStats:
    """Counts failures and retries, and keeps the last failures. The event loop's thread owns it."""

    def __init__(self) -> None:
        self._retries: Counter[EngineRole] = Counter()
        self._failures: dict[EngineRole, Counter[FailureKind]] = {role: Counter() for role in EngineRole}
        self._recent: deque[RecentFailure] = deque(maxlen=MAX_RECENT)
        self._number = 0

    @owned
    def failed(self, role: EngineRole, failure: Failure, request_id: str) -> None:
        """An attempt at an engine of `role` failed."""
        self._failures[role][failure.kind] += 1
        self._number += 1
        self._recent.appendleft(
            RecentFailure(
                self._number,
                time.time(),
                role,
                failure.url,
                failure.kind,
                one_line(failure.for_all, _MAX_REASON_CHARS),
                request_id[:_SHOWN_ID_CHARS],
            )
        )

    @owned
    def retried(self, role: EngineRole) -> None:
        self._retries[role] += 1

    def retries(self) -> Mapping[EngineRole, int]:
        return self._retries

    def failures(self) -> Mapping[EngineRole, Mapping[FailureKind, int]]:
        return self._failures

    def recent(self) -> Sequence[RecentFailure]:
        """The last failures, newest first."""
        return tuple(self._recent)

    def shown(self) -> dict[str, dict[str, object]]:
        """`{"retries": {"prefill": 1, ...}, "failures": {"prefill": {"timeout": 1}, ...}}`"""
        return {
            "retries": {role.value: self._retries[role] for role in EngineRole},
            "failures": {
                role.value: {kind.value: number for kind, number in counted.items()}
                for role, counted in self._failures.items()
            },
        }
