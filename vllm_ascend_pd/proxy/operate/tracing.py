# SPDX-License-Identifier: Apache-2.0
"""Tracing of requests, without OpenTelemetry, which is optional: only `otel` imports it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.rendezvous.observer import NOT_TRACED, Span
from vllm_ascend_pd.proxy.routing.addresses import is_http

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


def check_tracing(endpoint: str) -> None:
    """Raises ValueError, in words for the operator, if `endpoint` or the protocol is invalid, or packages are
    missing."""
    protocol = protocol_of_collector()
    if protocol not in (GRPC, HTTP):
        raise ValueError(f"{PROTOCOL_VARIABLE} is {protocol!r}: it must be {GRPC} or {HTTP}")
    if "@" in endpoint:  # the log shows the endpoint
        raise ValueError("the OTLP traces endpoint has credentials in it: put them into OTEL_EXPORTER_OTLP_HEADERS")
    has_port = protocol == GRPC and re.fullmatch(r"[^/]+:[0-9]+", endpoint) and is_http(f"http://{endpoint}")
    if not (is_http(endpoint) or has_port):  # gRPC accepts HOST:PORT, too
        raise ValueError(f"the OTLP traces endpoint {endpoint!r} is not a URL for {protocol}")
    try:
        from vllm_ascend_pd.proxy.operate import otel  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'vllm-ascend-pd[otel]'"
        ) from None


def protocol_of_collector() -> str:
    return os.environ.get(PROTOCOL_VARIABLE, GRPC)


def start_tracing(endpoint: str | None) -> Tracing:
    """Starts sending spans to `endpoint`, which `check_tracing` has accepted. None: no spans."""
    if endpoint is None:
        return Tracing()
    from vllm_ascend_pd.proxy.operate.otel import OtelTracing

    return OtelTracing(endpoint, protocol_of_collector())
