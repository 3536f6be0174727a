# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics`: the proxy's metrics for Prometheus: what the observer counts, and the state of queues and engines."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import Gauge, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from vllm_ascend_pd.proxy.rendezvous.observer import PREFIX, Observer
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool

# Not OpenMetrics: prometheus-client 0.26 replaces the colons of names by `_` there.
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self, observer: Observer, request_table: RequestTable, pools: tuple[EnginePool, ...]) -> None:
        self._registry = registry = observer.registry
        registry.register(_EngineCollector(pools))
        in_flight = Gauge(PREFIX + "requests_in_flight", "Client requests being served.", registry=registry)
        in_flight.set_function(lambda: request_table.in_flight)
        waiting = Gauge(PREFIX + "requests_waiting", "Client requests that wait to be served.", registry=registry)
        waiting.set_function(lambda: request_table.admission.waiting)

    async def get(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"Content-Type": _TEXT_FORMAT})


class _EngineCollector(Collector):
    """Each engine's health and this proxy's requests there, and the requests that wait for a slot."""

    def __init__(self, pools: tuple[EnginePool, ...]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        of_engine = ("role", "engine")
        at_engine = GaugeMetricFamily(
            PREFIX + "engine_requests",
            "This proxy's prompts at a prefill engine, or its sequences at a decode engine.",
            labels=of_engine,
        )
        waiting = GaugeMetricFamily(
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
            waiting.add_metric((pool.role.value,), pool.limiter.waiting)
        yield from (at_engine, up, ejected, waiting)
