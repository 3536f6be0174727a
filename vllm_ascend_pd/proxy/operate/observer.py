# SPDX-License-Identifier: Apache-2.0
"""Passes what the proxy reports about its requests to the metrics, the failure statistics and the traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.operate.failure_stats import FailureStats
from vllm_ascend_pd.proxy.operate.metrics import Metrics
from vllm_ascend_pd.proxy.operate.tracing import Tracing
from vllm_ascend_pd.proxy.rendezvous.observer import Observer, Span
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure


class OperatorObserver(Observer):
    """The observer of a running proxy."""

    def __init__(self, failure_stats: FailureStats, metrics: Metrics, tracing: Tracing) -> None:
        self._failure_stats = failure_stats
        self._metrics = metrics
        self._tracing = tracing

    @contextmanager
    def request(self, method: str, route: str, headers: Headers, reply: Reply) -> Iterator[Span]:
        traced = self._tracing.request(method, route, headers, reply)
        with self._metrics.request(route, reply), traced as span:
            yield span

    def request_refused(self, status: HTTPStatus) -> None:
        self._metrics.refused(status)

    def attempt_failed(self, role: EngineRole, failure: Failure, request_id: str) -> None:
        self._failure_stats.failed(role, failure, request_id)

    def attempt_retried(self, role: EngineRole) -> None:
        self._failure_stats.retried(role)

    def asked_without_prefill(self) -> None:
        self._metrics.asked_without_prefill()

    @contextmanager
    def ticket_waits(self) -> Iterator[None]:
        with self._metrics.ticket_waits():
            yield

    def prefilled(self, seconds: float) -> None:
        self._metrics.prefilled(seconds)

    def first_token_after_prefill(self, seconds: float) -> None:
        self._metrics.first_token_after_prefill(seconds)
