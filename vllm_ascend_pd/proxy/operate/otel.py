# SPDX-License-Identifier: Apache-2.0
"""Spans of requests, sent to an OTLP collector by a thread that requests never wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.operate.tracing import FIRST_TOKEN_SECONDS, GRPC, Tracing
from vllm_ascend_pd.proxy.rendezvous.observer import ERROR, REQUEST_ID, Attributes, Span
from vllm_ascend_pd.proxy.rendezvous.retry import Failure
from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind

log = logging.getLogger(__name__)

_SERVICE = "vllm-ascend-pd-proxy"
_W3C = TraceContextTextMapPropagator()
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_MAX_REASON_CHARS = 300
_MAX_ID_CHARS = 128
# The reasons of others may quote an engine's answer, in which a prompt may be quoted again.
_QUOTES_NOBODY = frozenset(
    {FailureKind.UNREACHABLE, FailureKind.LOST, FailureKind.TIMEOUT, FailureKind.TRANSFER, FailureKind.NO_ENGINE}
)
_SEE_LOG = "the proxy's log has the reason"
# Stays when the proxy stops: what an exporter says when it is cut short is of no use.
_SILENCE = logging.NullHandler()
# Between two lines about spans that are lost although the collector answers.
_QUIET_SECONDS = 60.0
# For what has not been sent when the proxy stops.
_LAST_SECONDS = 1.0


class OtelSpan(Span):
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._has_failed = False

    def onto(self, headers: Headers) -> Headers:
        ours: dict[str, str] = {}
        _W3C.inject(ours, self._as_parent())
        kept = [(name, value) for name, value in headers if name not in _TRACE_HEADERS]
        return [*kept, *((name.encode(), value.encode()) for name, value in ours.items())]

    @contextmanager
    def child(self, name: str, attributes: Attributes) -> Iterator[Span]:
        span = self._tracer.start_span(name, self._as_parent(), SpanKind.CLIENT, attributes)
        with _ending(OtelSpan(self._tracer, span)) as child:
            yield child

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes)

    def failed(self, failure: Failure) -> None:
        self.fail(failure.kind.label, failure.for_all if failure.kind in _QUOTES_NOBODY else _SEE_LOG)

    def fail(self, kind: str, reason: str = "") -> None:
        if not self._has_failed:
            self._has_failed = True
            self.note({ERROR: kind})
            self._span.set_status(Status(StatusCode.ERROR, one_line(reason or kind, _MAX_REASON_CHARS)))

    def end(self) -> None:
        self._span.end()

    def _as_parent(self) -> Context:
        return trace.set_span_in_context(self._span, Context())


@contextmanager
def _ending(span: OtelSpan) -> Iterator[OtelSpan]:
    try:
        yield span
    except Exception as error:
        span.fail(type(error).__name__, _SEE_LOG)
        raise
    except BaseException:
        span.event("cancelled", {})  # no failure: a prefill, once decode has all it needs
        raise
    finally:
        span.end()


class OtelTracing(Tracing):
    def __init__(self, endpoint: str, protocol: str) -> None:
        """Queue, batches, times and headers are as OpenTelemetry's OTEL_ variables say, as in vLLM."""
        self._said = _Said(endpoint)
        # As vLLM does: gRPC is in the clear unless the endpoint begins with https.
        exporter = GrpcExporter(endpoint=endpoint, insecure=True) if protocol == GRPC else HttpExporter(endpoint)
        self._exporter = _Watched(exporter, self._said)
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("vllm_ascend_pd.proxy")

    @contextmanager
    def request(self, method: str, route: str, headers: Headers, reply: Reply) -> Iterator[Span]:
        begun = time.monotonic()
        attributes: Attributes = {"http.request.method": method, "http.route": route}
        span = self._tracer.start_span(f"{method} {route}", _parent(headers), SpanKind.SERVER, attributes)
        with _ending(OtelSpan(self._tracer, span)) as request:
            try:
                yield request
            finally:
                _answered(request, reply, begun)

    def close(self) -> None:
        # In a thread, as versions of the SDK differ in how long it takes where no collector answers.
        thread = threading.Thread(target=self._provider.shutdown, name="pd-traces-end", daemon=True)
        thread.start()
        thread.join(0.0 if self._said.failing else _LAST_SECONDS)
        self._said.close()


def _answered(span: OtelSpan, reply: Reply, begun: float) -> None:
    if reply.request_id is not None:
        span.note({REQUEST_ID: one_line(reply.request_id, _MAX_ID_CHARS)})
    if reply.first_event_at is not None:
        span.note({FIRST_TOKEN_SECONDS: reply.first_event_at - begun})
    if reply.status is not None:
        span.note({"http.response.status_code": int(reply.status)})
        if reply.status >= 500:
            span.fail(str(reply.status), "answered with an error")
    if not reply.finished:
        span.fail("client_left" if reply.status is None else "broken_off", "the answer has not got to its end")


def _parent(headers: Headers) -> Context:
    """The span that the client names, if it names one. A header that is there twice is joined, as HTTP has it: two
    traceparents are none."""
    carrier: dict[str, str] = {}
    for name, value in headers:
        if name.lower() in _TRACE_HEADERS:
            key, text = name.lower().decode(), value.decode("latin-1")
            carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return _W3C.extract(carrier, Context())


def _resource() -> Resource:
    """What the environment says of this process, under our name unless it has another."""
    known = Resource.create()
    name = str(known.attributes.get("service.name", "unknown_service"))
    return known.merge(Resource({"service.name": _SERVICE})) if name.startswith("unknown_service") else known


class _Watched(SpanExporter):
    """An exporter whose failures are said once."""

    def __init__(self, exporter: SpanExporter, said: _Said) -> None:
        self._exporter = exporter
        self._said = said

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._said.thread = threading.get_ident()
        result = self._exporter.export(spans)
        self._said.exported(result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Said(logging.Handler):
    """Takes the place of OpenTelemetry's own lines, several for each batch that cannot be sent: one when that begins,
    one when it is over."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self.failing = False
        self.thread: int | None = None
        """Where the exporter runs: another proxy of this process has its own."""
        self._endpoint = endpoint
        self._quiet_until = 0.0
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.addHandler(_SILENCE)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        said = one_line(record.getMessage(), _MAX_REASON_CHARS)
        if record.name.startswith("opentelemetry.exporter"):
            if record.thread == self.thread:
                self._fails(said)
            return
        # Its queue is full, say. What it finds wrong with a client's headers is not worth a line.
        is_ours = record.name.startswith("opentelemetry.sdk")
        if is_ours and not self.failing and time.monotonic() > self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_SECONDS
            log.warning("traces for %s: %s", self._endpoint, said)

    def exported(self, done: bool) -> None:
        if not done:
            self._fails("it did not take them")
        elif self.failing:
            self.failing = False
            log.info("traces are sent to %s again", self._endpoint)

    def _fails(self, reason: str) -> None:
        """An exporter may try for a minute before it gives a batch up."""
        if not self.failing:
            self.failing = True
            log.warning(
                "traces cannot be sent to %s and are lost if that lasts, requests are served as ever: %s",
                self._endpoint,
                reason,
            )

    def close(self) -> None:
        self._logger.removeHandler(self)
        super().close()
