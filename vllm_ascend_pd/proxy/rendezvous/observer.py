# SPDX-License-Identifier: Apache-2.0
"""What the proxy records about its requests: counts and times for Prometheus, and the last failures.

The modules of this folder report here. `GET /metrics` shows it with the state of queues and engines.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.streams import Reply
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure, FailureKind
from vllm_ascend_pd.proxy.routing.dispatch import EnginePool

PREFIX = "vllm:kv_pd_proxy_"
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
"""Not OpenMetrics: prometheus-client 0.26 replaces the colons of names by `_` there."""
CLIENT_LEFT = 499
"""nginx's status of requests whose client left before the answer."""
MAX_RECENT = 50
_MAX_REASON_CHARS = 300
_SHOWN_ID_CHARS = 8
"""Enough to find a log line. With the whole id of a running request, a client could post tickets for it."""
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)


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


class ProxyObserver(Collector):
    """Receives reports about client requests and attempts at engines. The event loop's thread owns it."""

    def __init__(self, request_table: RequestTable, pools: Sequence[EnginePool]) -> None:
        """`request_table`, `pools`: whose state the metrics show, too."""
        self._request_table = request_table
        self._pools = pools
        self._registry = registry = CollectorRegistry()
        """This proxy's metrics. Each proxy in a process has its own."""
        self.retries: collections.Counter[EngineRole] = collections.Counter()
        """Attempts that followed a failed one."""
        self.failures: collections.Counter[tuple[EngineRole, FailureKind]] = collections.Counter()
        """Failed attempts at engines."""
        self.recent_failures: collections.deque[RecentFailure] = collections.deque(maxlen=MAX_RECENT)
        """The last failures, newest first."""
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._requests = counter(
            PREFIX + "requests",
            f"Completed requests by path and HTTP status. {CLIENT_LEFT}: the client left before the answer.",
            ("route", "status"),
        )
        self.refused = counter(
            PREFIX + "refused_requests",
            "Requests refused before an engine was asked. 429: too many or too long; 503: no room, or shutdown.",
            ("status",),
        )
        self._first_token = histogram(
            PREFIX + "time_to_first_token_seconds",
            "Time from a streaming request's arrival to its first token.",
            ("route",),
            buckets=_FIRST_TOKEN_SECONDS,
        )
        self._duration = histogram(
            PREFIX + "request_duration_seconds",
            "Time from a request's arrival to its end, failed requests included.",
            ("route",),
            buckets=_REQUEST_SECONDS,
        )
        self.prefill_seconds = histogram(
            PREFIX + "prefill_seconds",
            "Time of successful prefills at the engine, its queue included.",
            buckets=_REQUEST_SECONDS,
        )
        self.after_prefill_seconds = histogram(
            PREFIX + "prefill_to_first_token_seconds",
            "Time from the first prefill's end to a stream's first token: remaining transfer and a decode step.",
            buckets=_FIRST_TOKEN_SECONDS,
        )
        self.without_prefill = counter(
            PREFIX + "requests_without_prefill",
            "Requests for which decode was told that no prefill engine is well, so that it may compute their prompts.",
        )
        self.tickets_waiting = Gauge(
            PREFIX + "tickets_waiting", "Tickets at the metaserver whose prefill has not ended.", registry=registry
        )
        for status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self.refused.labels(str(status.value))  # 0 from the start, not unknown
        registry.register(self)

    @contextmanager
    def request(self, route: str, reply: Reply) -> Iterator[None]:
        """A client's request, from its arrival to its end.

        `route`: the path of one of the proxy's routes. `reply`: its state afterwards tells how the request ended.
        """
        begun = time.monotonic()
        try:
            yield
        finally:
            status = CLIENT_LEFT if reply.status is None else reply.status
            self._requests.labels(route, str(status)).inc()
            self._duration.labels(route).observe(time.monotonic() - begun)
            if reply.first_event_at is not None:
                self._first_token.labels(route).observe(reply.first_event_at - begun)

    @owned
    def attempt_failed(self, role: EngineRole, failure: Failure, request_id: str) -> None:
        """An attempt at an engine of `role` failed. `request_id`: of the decode attempt."""
        self.failures[role, failure.kind] += 1
        self.recent_failures.appendleft(
            RecentFailure(
                self.failures.total(),
                time.time(),
                role,
                failure.url,
                failure.kind,
                one_line(failure.for_all, _MAX_REASON_CHARS),
                request_id[:_SHOWN_ID_CHARS],
            )
        )

    async def metrics(self, _: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        return Response(generate_latest(self._registry), headers={"Content-Type": _TEXT_FORMAT})

    def collect(self) -> Iterator[Metric]:
        """What the proxy counts or knows anyway: for each scrape."""
        table = self._request_table
        in_flight = GaugeMetricFamily(PREFIX + "requests_in_flight", "Client requests being served.", table.in_flight)
        waiting = GaugeMetricFamily(
            PREFIX + "requests_waiting", "Client requests that wait to be served.", table.queue.waiting
        )
        retries = CounterMetricFamily(PREFIX + "retries", "Attempts that followed a failed one.", labels=("role",))
        failures = CounterMetricFamily(
            PREFIX + "failures", "Failed attempts at engines, by kind of failure.", labels=("role", "kind")
        )
        for role in EngineRole:
            retries.add_metric((role.value,), self.retries[role])
            for kind in FailureKind:
                failures.add_metric((role.value, kind.label), self.failures[role, kind])
        of_engine = ("role", "engine")
        at_engine = GaugeMetricFamily(
            PREFIX + "engine_requests",
            "This proxy's prompts at a prefill engine, or its sequences at a decode engine.",
            labels=of_engine,
        )
        queue = GaugeMetricFamily(
            PREFIX + "queue_depth", "Requests that wait for a slot at an engine.", labels=("role",)
        )
        up = GaugeMetricFamily(
            PREFIX + "engine_up", "1 for an engine whose last health check was good, else 0.", labels=of_engine
        )
        ejected = GaugeMetricFamily(
            PREFIX + "engine_ejected",
            "1 for an engine that gets requests only if no other is left.",
            labels=of_engine,
        )
        now = time.monotonic()
        for pool in self._pools:
            for engine in pool.engines:
                labels = (pool.role.value, engine.url)
                at_engine.add_metric(labels, engine.sent.requests)
                up.add_metric(labels, engine.gate.answers)
                ejected.add_metric(labels, engine.gate.doubtful(now))
            queue.add_metric((pool.role.value,), pool.queue.waiting)
        yield from (in_flight, waiting, retries, failures, at_engine, up, ejected, queue)
