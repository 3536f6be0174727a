# SPDX-License-Identifier: Apache-2.0
"""Spans of requests, sent to an OTLP collector by a background thread. Requests never wait for it.

OpenTelemetry's ASGI instrumentation does not fit. It exports the query string and the client's address, has no route,
and leaves spans of broken-off answers without an error. It also pins one version of the semantic conventions exactly,
so it would change vLLM's packages. It could replace only `OtelTracing.request` and `_parent` below.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.messages import Headers
from vllm_ascend_pd.proxy.http.streams import Reply
from vllm_ascend_pd.proxy.rendezvous.observer import ERROR, REQUEST_ID, Attributes, Span, Tracing
from vllm_ascend_pd.proxy.routing.answers import Failure, FailureKind

_SERVICE = "vllm-ascend-pd-proxy"
_W3C = TraceContextTextMapPropagator()
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_MAX_REASON_CHARS = 300
_MAX_ID_CHARS = 128
# Reasons of other kinds may quote an engine's answer, which may quote a prompt.
_SAFE_REASONS = frozenset(
    {FailureKind.UNREACHABLE, FailureKind.LOST, FailureKind.TIMEOUT, FailureKind.TRANSFER, FailureKind.NO_ENGINE}
)
_SEE_LOG = "the proxy's log has the reason"
_FIRST_TOKEN_SECONDS = "gen_ai.latency.time_to_first_token"
"""vLLM uses the same name in its own span of a request."""
_LAST_SECONDS = 1.0
"""For unsent spans when the proxy stops."""


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
        self.fail(failure.kind.label, failure.for_all if failure.kind in _SAFE_REASONS else _SEE_LOG)

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
        span.event("cancelled", {})  # not a failure: decode has all it needs of this prefill, for instance
        raise
    finally:
        span.end()


class OtelTracing(Tracing):
    def __init__(self, endpoint: str, *, over_grpc: bool) -> None:
        """OpenTelemetry's OTEL_ variables configure queue, batches, times and headers, as in vLLM. It logs by itself
        what it cannot send."""
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)  # it logs each invalid header of a client
        # As in vLLM, gRPC is not encrypted unless the endpoint begins with https.
        exporter = GrpcExporter(endpoint=endpoint, insecure=True) if over_grpc else HttpExporter(endpoint)
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
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
        """Sends the remaining spans, for `_LAST_SECONDS` at most."""
        # In a thread: without a collector, some versions of the SDK take long here.
        thread = threading.Thread(target=self._provider.shutdown, name="pd-traces-end", daemon=True)
        thread.start()
        thread.join(_LAST_SECONDS)


def _answered(span: OtelSpan, reply: Reply, begun: float) -> None:
    if reply.request_id is not None:
        span.note({REQUEST_ID: one_line(reply.request_id, _MAX_ID_CHARS)})
    if reply.first_event_at is not None:
        span.note({_FIRST_TOKEN_SECONDS: reply.first_event_at - begun})
    if reply.status is not None:
        span.note({"http.response.status_code": int(reply.status)})
        if reply.status >= 500:
            span.fail(str(reply.status), "answered with an error")
    if not reply.finished:
        span.fail("client_left" if reply.status is None else "broken_off", "the answer was not completed")


def _parent(headers: Headers) -> Context:
    """The client's span, if its headers name a valid one. Repeated headers are joined, as in HTTP, so two traceparents
    are invalid."""
    carrier: dict[str, str] = {}
    for name, value in headers:
        if name.lower() in _TRACE_HEADERS:
            key, text = name.lower().decode(), value.decode("latin-1")
            carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return _W3C.extract(carrier, Context())


def _resource() -> Resource:
    """The process's attributes from the environment, with our service name unless it gives another."""
    known = Resource.create()
    name = str(known.attributes.get("service.name", "unknown_service"))
    return known.merge(Resource({"service.name": _SERVICE})) if name.startswith("unknown_service") else known
