# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics`: the proxy's metrics for Prometheus. Each proxy in a process has its own registry."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.operate.failure_stats import FailureStats
from vllm_ascend_pd.proxy.operate.latency import RecentSamples
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole, FailureKind
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool

PREFIX = "vllm:kv_pd_proxy_"

CLIENT_LEFT = 499
"""nginx's status of requests whose client left before the answer."""

# Not OpenMetrics: prometheus-client 0.26 replaces the colons of names by `_` there.
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class Metrics:
    def __init__(
        self,
        request_table: RequestTable,
        failure_stats: FailureStats,
        pools: tuple[EnginePool, ...],
    ) -> None:
        self.recent_first_token = RecentSamples()
        self.recent_prefill = RecentSamples()
        self.recent_after_prefill = RecentSamples()
        self._registry = registry = CollectorRegistry()
        registry.register(_FailureCollector(failure_stats))
        registry.register(_EngineCollector(pools))
        registry.register(_PromptCollector(pools))
        self._requests = Counter(
            PREFIX + "requests",
            f"Completed requests by path and HTTP status. {CLIENT_LEFT}: the client left before the answer.",
            ("route", "status"),
            registry=registry,
        )
        self._refused = Counter(
            PREFIX + "refused_requests",
            "Requests refused before any engine was asked. 429: too many waited, or too long; 503: shutdown.",
            ("status",),
            registry=registry,
        )
        in_flight = Gauge(PREFIX + "requests_in_flight", "Client requests being served.", registry=registry)
        in_flight.set_function(lambda: request_table.in_flight)
        waiting = Gauge(PREFIX + "requests_waiting", "Client requests that wait to be served.", registry=registry)
        waiting.set_function(lambda: request_table.admission.waiting)
        self._first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "Time from a streaming request's arrival to its first token.",
            ("route",),
            buckets=_FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self._duration = Histogram(
            PREFIX + "request_duration_seconds",
            "Time from a request's arrival to its end, failed requests included.",
            ("route",),
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self._prefill = Histogram(
            PREFIX + "prefill_seconds",
            "Time of successful prefills at the engine, its queue included.",
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self._after_prefill = Histogram(
            PREFIX + "prefill_to_first_token_seconds",
            "Time from the first prefill's end to a stream's first token: remaining transfer and a decode step.",
            buckets=_FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self._without_prefill = Counter(
            PREFIX + "requests_without_prefill",
            "Requests for which decode was told that no prefill engine is well, so that it may compute their prompts.",
            registry=registry,
        )
        self._tickets = Gauge(
            PREFIX + "tickets_waiting",
            "Tickets at the metaserver whose prefill has not ended.",
            registry=registry,
        )
        for status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self._refused.labels(str(status.value))  # 0, not unknown

    @contextmanager
    def request(self, route: str, reply: Reply) -> Iterator[None]:
        """Counts and times a client's request. `route`: the path of one of the proxy's routes."""
        begun = time.monotonic()
        try:
            yield
        finally:
            status = CLIENT_LEFT if reply.status is None else reply.status
            self._requests.labels(route, str(status)).inc()
            self._duration.labels(route).observe(time.monotonic() - begun)
            if reply.first_event_at is not None:
                self._first_token.labels(route).observe(reply.first_event_at - begun)
                self.recent_first_token.add(reply.first_event_at - begun, time.monotonic())

    def refused(self, status: HTTPStatus) -> None:
        self._refused.labels(str(status.value)).inc()

    def asked_without_prefill(self) -> None:
        self._without_prefill.inc()

    @contextmanager
    def ticket_waits(self) -> Iterator[None]:
        with self._tickets.track_inprogress():
            yield

    def prefilled(self, seconds: float) -> None:
        self._prefill.observe(seconds)
        self.recent_prefill.add(seconds, time.monotonic())

    def first_token_after_prefill(self, seconds: float) -> None:
        """Of a stream: the time of the remaining transfer and of decode's first step."""
        self._after_prefill.observe(seconds)
        self.recent_after_prefill.add(seconds, time.monotonic())

    async def get(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"Content-Type": _TEXT_FORMAT})


class _FailureCollector(Collector):
    """The counts that `/health` shows, too."""

    def __init__(self, failure_stats: FailureStats) -> None:
        self._failure_stats = failure_stats

    def collect(self) -> Iterator[Metric]:
        retries = CounterMetricFamily(PREFIX + "retries", "Attempts that followed a failed one.", labels=("role",))
        failures = CounterMetricFamily(
            PREFIX + "failures", "Failed attempts at engines, by kind of failure.", labels=("role", "kind")
        )
        for role in EngineRole:
            retries.add_metric((role.value,), self._failure_stats.retries().get(role, 0))
            of_role = self._failure_stats.failures()[role]
            for kind in FailureKind:
                failures.add_metric((role.value, kind.label), of_role.get(kind, 0))
        yield retries
        yield failures


class _EngineCollector(Collector):
    """Each engine's health and this proxy's requests there, and the requests that wait for a slot."""

    def __init__(self, pools: tuple[EnginePool, ...]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        at_engine = GaugeMetricFamily(
            PREFIX + "engine_requests",
            "This proxy's prompts at a prefill engine, or its sequences at a decode engine.",
            labels=("role", "engine"),
        )
        up = GaugeMetricFamily(
            PREFIX + "engine_up", "1 for an engine whose last health check was good, else 0.", labels=("role", "engine")
        )
        waiting = GaugeMetricFamily(
            PREFIX + "queue_depth", "Requests that wait for a slot at an engine.", labels=("role",)
        )
        ejected = GaugeMetricFamily(
            PREFIX + "engine_ejected",
            "1 for an engine whose checks fail or which refuses what others take: others come first.",
            labels=("role", "engine"),
        )
        for pool in self._pools:
            for engine in pool.engines:
                up.add_metric((pool.role.value, engine.url), engine.gate.last_check == "ok")
                ejected.add_metric((pool.role.value, engine.url), engine.gate.ejected)
                at_engine.add_metric((pool.role.value, engine.url), engine.sent.requests)
            waiting.add_metric((pool.role.value,), pool.limiter.waiting)
        yield at_engine
        yield up
        yield ejected
        yield waiting


class _PromptCollector(Collector):
    """Who computed prompts, by the decode engines' reports."""

    def __init__(self, pools: tuple[EnginePool, ...]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        labels = ("by", "reason")
        prompts = CounterMetricFamily(
            PREFIX + "prompts", "Prompts by who computed what decode had not cached of them, and why.", labels=labels
        )
        tokens = CounterMetricFamily(
            PREFIX + "prompt_tokens", "Tokens of these prompts that decode had not cached.", labels=labels
        )
        for pool in self._pools:
            for each in pool.engines.prompts.sums():
                prompts.add_metric((each.by, each.reason), each.prompts)
                tokens.add_metric((each.by, each.reason), each.tokens)
        yield prompts
        yield tokens
