# SPDX-License-Identifier: Apache-2.0
"""The interface of tracing, and tracing that does nothing. OpenTelemetry is optional: only `otel.py` imports it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.rendezvous.observer import NOT_TRACED, Span

FIRST_TOKEN_SECONDS = "gen_ai.latency.time_to_first_token"
"""vLLM uses the same name in its own span of a request."""

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""The environment variable for the collector's protocol, as in vLLM."""
GRPC, HTTP = "grpc", "http/protobuf"


class Tracing:
    """Makes a span of each client's request. This class makes none; `OtelTracing` does."""

    @contextmanager
    def request(self, method: str, route: str, headers: Headers, reply: Reply) -> Iterator[Span]:
        """A client's request, from its arrival to its end. `headers`: the client's, which may name a parent span.
        `reply`: its state afterwards tells how the request ended."""
        yield NOT_TRACED

    def close(self) -> None:
        """Sends the remaining spans, for two seconds at most."""
