# SPDX-License-Identifier: Apache-2.0
"""The connector's metrics on vLLM's `/metrics` and in its log, in vLLM's classes, and its spans in vLLM's traces.

In each step vLLM adds up the statistics of ranks and scheduler, and sends them to the process that serves HTTP.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.tracing import extract_trace_context

from vllm_ascend_pd.core.observer import (
    Observed,
    Observer,
    PushBegun,
    PushEnded,
    PushRefused,
    ReceiveEnded,
    TicketIssued,
)
from vllm_ascend_pd.core.reasons import PushFailure, ReceiveFailure
from vllm_ascend_pd.core.step import WorkerReport
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.observe.stats import (
    DECODE_METRICS,
    PREFILL_METRICS,
    PREFIX,
    Counter,
    Data,
    Histogram,
    merged,
    observations,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step, from the scheduler to every rank."""

    # A `PrefillStep` or a `DecodeStep`, by the engine's side.
    step: Any


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """A report, from ranks to the scheduler. vLLM aggregates those of all ranks into one."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.merge(other.report))


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A decode rank's description, from the rank to the scheduler, when the engine starts."""

    # The rank's `RankDescription`, encoded: nothing in between reads it.
    encoded: bytes
    # As in `EngineDescription`. The same on all ranks.
    settings: dict[str, str] = field(default_factory=dict)


@dataclass
class LayerwisePushStats(KVConnectorStats):
    """`data` as `observe/stats.py` describes it."""

    data: Data

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "LayerwisePushStats":
        self.data = merged(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        return not self.data

    def reduce(self) -> dict[str, int | float]:
        """Returns what vLLM logs: sums of counters, means of histograms, and gauges. Zeros are left out."""
        data = self.data
        shown: dict[str, int | float] = {}
        for name, sums in data.get("counters", {}).items():
            for reason, amount in sums.items():
                shown[f"{name}[{reason}]" if reason else name] = amount
        for name, (counts, totals) in data.get("histograms", {}).items():
            shown[f"{name} (mean of {sum(counts)})"] = round(sum(totals) / sum(counts), 6)
        for name, values in data.get("gauges", {}).items():
            shown[name] = sum(values.values())
        return {name: value for name, value in shown.items() if value}


class LayerwisePushPromMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics of the engine's side: a prefill engine has prefill's only, a decode engine decode's."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        is_producer = vllm_config.kv_transfer_config.is_kv_producer
        self._families: dict[str, Any] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in PREFILL_METRICS if is_producer else DECODE_METRICS:
            common = {
                "name": PREFIX + metric.name,
                "documentation": metric.help,
                "labelnames": [*labelnames, *metric.labels],
            }
            if isinstance(metric, Counter):
                family = metric_types[prometheus_client.Counter](**common)
            elif isinstance(metric, Histogram):
                self._histograms[metric.name] = metric
                family = metric_types[prometheus_client.Histogram](**common, buckets=list(metric.bounds))
            else:
                family = metric_types[prometheus_client.Gauge](**common, multiprocess_mode="mostrecent")
            self._families[metric.name] = family
            for engine in per_engine_labelvalues:  # from the start, so that they are 0 and not missing
                if isinstance(metric, Counter):
                    for reason in metric.reasons:
                        self._series(metric.name, engine, *_labels(reason))
                elif not metric.labels:
                    self._series(metric.name, engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data: Data = transfer_stats_data
        for name, sums in data.get("counters", {}).items():
            for reason, amount in sums.items():
                self._series(name, engine_idx, *_labels(reason)).inc(amount)
        for name, (counts, totals) in data.get("histograms", {}).items():
            series = self._series(name, engine_idx)
            for value, count in observations(self._histograms[name], counts, totals):
                for _ in range(count):
                    series.observe(value)
        for name, values in data.get("gauges", {}).items():
            for rank, value in values.items():
                self._series(name, engine_idx, *_labels(rank)).set(value)

    def _series(self, name: str, engine: int, *labels: str) -> Any:
        """Returns one time series. `labels`: values of the metric's own labels."""
        return self._families[name].labels(*self.per_engine_labelvalues[engine], *labels)


def _labels(values: str) -> list[str]:
    """Splits a key of `observe/stats.py` into the values of labels."""
    return values.split(",") if values else []


# Spans of KV transfers, in the trace that a request's headers name. vLLM's tracing must be on.

# Attributes. docs/metrics.md explains them.
REQUEST_ID = "gen_ai.request.id"
TOKENS = "kv_pd.tokens"
CACHED_TOKENS = "kv_pd.cached_tokens"
DECODE_ENGINE = "kv_pd.decode_engine"
RECEIVED_BYTES = "kv_pd.received_bytes"
EARLY_BYTES = "kv_pd.bytes_before_prefill_end"

_MAX_REASON_CHARS = 300


class _TransferSpans:
    """A span for each transfer of a side. Ending one puts it into a queue, and another thread sends it.

    Nothing is recorded without a request's trace headers. vLLM keeps these only if tracing is on.
    """

    def __init__(self, name: str) -> None:
        """`name`: of the spans."""
        self._name = name
        # By request id, of transfers that have not ended: the trace headers, and when it began (nanoseconds).
        self._begun: dict[str, tuple[Mapping[str, str], int]] = {}

    def _begin(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        if headers:
            self._begun[request_id] = headers, time.time_ns()

    def _end(
        self, request_id: str, attributes: dict[str, str | int], error: str | None = None, reason: str = ""
    ) -> None:
        """Ends the request's span. `error`: how the transfer failed, in a word; None: it did not.

        Neither `error` nor `reason` may quote a client's or another engine's words about a prompt.
        """
        if request_id not in self._begun:
            return
        headers, begun_ns = self._begun.pop(request_id)
        context = extract_trace_context(headers)
        if context is None:  # OpenTelemetry is not installed
            return
        from opentelemetry import trace

        if not trace.get_current_span(context).get_span_context().is_valid:
            return  # the span would begin a trace of its own
        # vLLM has made the provider for this process.
        span = trace.get_tracer("vllm_ascend_pd").start_span(
            self._name, context, attributes=attributes, start_time=begun_ns
        )
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, one_line(reason or error, _MAX_REASON_CHARS)))
        span.end()


class PushSpans(_TransferSpans, Observer):
    """A span `kv_push` for each transfer of a prefill engine."""

    def __init__(self) -> None:
        super().__init__("kv_push")

    def on(self, event: Observed) -> None:
        match event:
            case PushBegun():
                self._begin(event.request_id, event.trace_headers)
            case PushRefused():
                self._end(event.request_id, {}, PushFailure.TICKET.value, event.reason)
            case PushEnded(ticket=ticket, failure=failure):
                attributes: dict[str, str | int] = {
                    REQUEST_ID: ticket.request_id,
                    DECODE_ENGINE: ticket.remote_engine_id,
                    TOKENS: ticket.num_tokens - ticket.remote_cached_tokens,
                    CACHED_TOKENS: ticket.remote_cached_tokens,
                }
                self._end(event.request_id, attributes, None if failure is None else "not_delivered", failure or "")


class ReceiveSpans(_TransferSpans, Observer):
    """A span `kv_receive` for each ticket of a decode engine."""

    def __init__(self) -> None:
        super().__init__("kv_receive")

    def on(self, event: Observed) -> None:
        match event:
            case TicketIssued():
                self._begin(event.request_id, event.trace_headers)
            case ReceiveEnded(ticket=ticket, cause=cause):
                attributes: dict[str, str | int] = {
                    REQUEST_ID: ticket.request_id,
                    TOKENS: ticket.num_tokens - ticket.remote_cached_tokens,
                    RECEIVED_BYTES: event.received_bytes,
                    EARLY_BYTES: event.early_bytes,
                }
                # The reason of a failed prefill is the metaserver's text, which may quote an engine's error about a
                # prompt.
                reason = "" if cause is ReceiveFailure.PREFILL else event.failure
                self._end(event.request_id, attributes, None if cause is None else cause.value, reason)
