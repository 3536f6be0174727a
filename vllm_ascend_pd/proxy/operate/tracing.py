# SPDX-License-Identifier: Apache-2.0
"""What the trace of a request is told. OpenTelemetry is optional: `otel` needs it, and nothing else does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.rendezvous.retry import Failure
from vllm_ascend_pd.proxy.routing.addresses import is_http
from vllm_ascend_pd.proxy.routing.failure_kind import FailureKind

Attributes = Mapping[str, str | int | float | Sequence[str]]
"""Never anything of a prompt, an answer or a credential: a collector is open to more people than the engines."""

# The names that vLLM gives its own span of a request.
REQUEST_ID = "gen_ai.request.id"
FIRST_TOKEN_SECONDS = "gen_ai.latency.time_to_first_token"
ENGINE = "kv_pd.engine"
UNREACHABLE = "kv_pd.unreachable_engines"
ATTEMPT = "kv_pd.attempt"
PROMPT = "kv_pd.prompt"
ERROR = "error.type"

# As vLLM reads it: which protocol the collector speaks.
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
GRPC, HTTP = "grpc", "http/protobuf"


class Span:
    """A part of a request's work. This one is not traced."""

    def onto(self, headers: Headers) -> Headers:
        """Headers for an engine, whose own spans become children of this one. Not traced: the client's as they are."""
        return headers

    @contextmanager
    def child(self, name: str, attributes: Attributes) -> Iterator[Span]:
        yield self

    def note(self, attributes: Attributes) -> None:
        pass

    def asked(self, engines: Sequence[str]) -> None:
        """Which engines were tried in turn; only the last one could be connected to, if any."""
        if engines:
            self.note({ENGINE: engines[-1]})
        if len(engines) > 1:
            self.note({UNREACHABLE: list(engines[:-1])})

    def event(self, name: str, attributes: Attributes) -> None:
        pass

    def failed(self, failure: Failure) -> None:
        """The first failure counts: what comes after it is a consequence."""

    def retried(self, failure: Failure, engine: str) -> None:
        """A part of this one failed, and is tried again, at `engine` first."""
        self.event("retry", {ERROR: error_type(failure.kind), ENGINE: engine})


NOT_TRACED = Span()


class Tracing:
    """Makes the span of each client's request. This one makes none."""

    @contextmanager
    def request(self, method: str, route: str, headers: Headers, reply: Reply) -> Iterator[Span]:
        """`headers`: the client's, which may name a span that this one belongs below. What `reply` has become says how
        the request ended."""
        yield NOT_TRACED

    def close(self) -> None:
        """Sends what has not been sent, for a second or two at most."""


def error_type(kind: FailureKind) -> str:
    """As the metric of failures labels them."""
    return kind.value.replace(" ", "_")


def check_tracing(endpoint: str) -> None:
    """Raises ValueError, in words meant for the operator, if spans cannot be sent to `endpoint`."""
    protocol = protocol_of_collector()
    if protocol not in (GRPC, HTTP):
        raise ValueError(f"{PROTOCOL_VARIABLE} is {protocol!r}: it must be {GRPC} or {HTTP}")
    if "@" in endpoint:  # it will be in the log
        raise ValueError("the OTLP traces endpoint has credentials in it: put them into OTEL_EXPORTER_OTLP_HEADERS")
    has_port = protocol == GRPC and re.fullmatch(r"[^/]+:[0-9]+", endpoint) and is_http(f"http://{endpoint}")
    if not (is_http(endpoint) or has_port):  # gRPC takes HOST:PORT, too
        raise ValueError(f"the OTLP traces endpoint {endpoint!r} is not a URL that {protocol} can be spoken to")
    try:
        from vllm_ascend_pd.proxy.operate import otel  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'vllm-ascend-pd[otel]'"
        ) from None


def protocol_of_collector() -> str:
    return os.environ.get(PROTOCOL_VARIABLE, GRPC)


def start_tracing(endpoint: str | None) -> Tracing:
    """Sends spans to `endpoint`, which `check_tracing` has found to be good; None: makes no spans."""
    if endpoint is None:
        return Tracing()
    from vllm_ascend_pd.proxy.operate.otel import OtelTracing

    return OtelTracing(endpoint, protocol_of_collector())
