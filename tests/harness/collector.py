# SPDX-License-Identifier: Apache-2.0
"""A collector of OpenTelemetry traces: takes spans over OTLP by gRPC, and keeps them for a test."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from harness.waiting import wait_for

HOST = "127.0.0.1"
SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Span:
    """As it arrived. Times in nanoseconds since the epoch; `parent`: "" for a trace's first."""

    trace: str
    id: str
    parent: str
    name: str
    process: dict[str, object]
    attributes: dict[str, object]
    events: tuple[tuple[str, dict[str, object]], ...]
    begun: int
    ended: int
    failed: bool
    reason: str


class Collector(TraceServiceServicer):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.raw = b""
        """All that arrived, to look for what must not be in it."""
        self._grpc = grpc.server(ThreadPoolExecutor(4))
        add_TraceServiceServicer_to_server(self, self._grpc)
        self.url = f"http://{HOST}:{self._grpc.add_insecure_port(f'{HOST}:0')}"

    def __enter__(self) -> "Collector":
        self._grpc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(grace=0).wait(10)

    def spans(self, trace: str | None = None) -> list[Span]:
        """Returns the spans of one trace, or all, in the order of their beginnings."""
        with self._lock:
            found = [span for span in self._spans if trace in (None, span.trace)]
        return sorted(found, key=lambda span: span.begun)

    def wait(self, enough: Callable[[list[Span]], bool], trace: str | None = None) -> list[Span]:
        """Returns the spans as soon as there are enough."""
        return wait_for(lambda: self.spans(trace), enough, SECONDS)

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        spans = [
            _span(span, _values(resource.resource.attributes))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += spans
            self.raw += request.SerializeToString()
        return ExportTraceServiceResponse()


def _span(span: Sent, process: dict[str, object]) -> Span:
    return Span(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        process=process,
        attributes=_values(span.attributes),
        events=tuple((event.name, _values(event.attributes)) for event in span.events),
        begun=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        reason=span.status.message,
    )


def _values(attributes: list[KeyValue]) -> dict[str, object]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)
