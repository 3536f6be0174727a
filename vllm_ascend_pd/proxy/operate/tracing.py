# SPDX-License-Identifier: Apache-2.0
"""Checks the options of tracing, and starts it with OpenTelemetry where it is asked for.

OpenTelemetry is optional: only `otel.py` imports it.
"""

import os
import re

from vllm_ascend_pd.proxy.rendezvous.observer import Tracing
from vllm_ascend_pd.proxy.routing.discovery import is_http

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""The environment variable for the collector's protocol, as in vLLM."""
GRPC, HTTP = "grpc", "http/protobuf"


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
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        ) from None


def start_tracing(endpoint: str | None) -> Tracing:
    """Starts sending spans to `endpoint`, which `check_tracing` has accepted. None: no spans."""
    if endpoint is None:
        return Tracing()
    from vllm_ascend_pd.proxy.operate.otel import OtelTracing

    return OtelTracing(endpoint, over_grpc=protocol_of_collector() == GRPC)


def protocol_of_collector() -> str:
    return os.environ.get(PROTOCOL_VARIABLE, GRPC)
