# SPDX-License-Identifier: Apache-2.0
"""What the proxy reports about its requests. `operate/` implements it: metrics, failure statistics and traces.

`Observer` and `Span` themselves ignore all reports, so nothing here depends on how requests are observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from vllm_ascend_pd.proxy.http.headers import Headers
from vllm_ascend_pd.proxy.http.reply import Reply
from vllm_ascend_pd.proxy.routing.answers import EngineRole, Failure

Attributes = Mapping[str, str | int | float | Sequence[str]]
"""Attributes of a span. They never hold anything of a prompt, an answer or a credential: more people can read the
collector than the engines."""

REQUEST_ID = "gen_ai.request.id"
"""vLLM uses the same name in its own span of a request."""
ENGINE = "kv_pd.engine"
UNREACHABLE = "kv_pd.unreachable_engines"
PROMPT = "kv_pd.prompt"
ERROR = "error.type"
REQUESTED = "kv_pd.who_computes"
WITHOUT_PREFILL = "kv_pd.without_prefill"
COMPUTED_BY = "kv_pd.computed_by"


class Span:
    """One part of a request's work, for a trace."""

    def onto(self, headers: Headers) -> Headers:
        """Returns headers for an engine, so that the engine's own spans become children of this one. Without a trace,
        these are the client's headers unchanged."""
        return headers

    @contextmanager
    def child(self, name: str, attributes: Attributes) -> Iterator[Span]:
        """A span below this one, for the time of the `with` block."""
        yield self

    def note(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def asked(self, engines: Sequence[str]) -> None:
        """Notes which engines were asked, in order. All but the last one could not be connected to, or refused."""
        if engines:
            self.note({ENGINE: engines[-1]})
        if len(engines) > 1:
            self.note({UNREACHABLE: list(engines[:-1])})

    def event(self, name: str, attributes: Attributes) -> None:
        """Adds an event at the current time."""

    def failed(self, failure: Failure) -> None:
        """Marks the span as failed. Only the first failure counts: later ones are its consequences."""

    def retried(self, failure: Failure, engine: str) -> None:
        """Notes that a child of this span failed and is retried, at `engine` first."""
        self.event("retry", {ERROR: failure.kind.label, ENGINE: engine})


NOT_TRACED = Span()


class Observer:
    """Receives reports about client requests and attempts at engines."""

    @contextmanager
    def request(self, method: str, route: str, headers: Headers, reply: Reply) -> Iterator[Span]:
        """A client's request, from its arrival to its end.

        `route`: the path of one of the proxy's routes. `headers`: the client's, which may name a parent span.
        `reply`: its state afterwards tells how the request ended.
        """
        yield NOT_TRACED

    def request_refused(self, status: HTTPStatus) -> None:
        """A client's request was refused before any engine was asked."""

    def attempt_failed(self, role: EngineRole, failure: Failure, request_id: str) -> None:
        """An attempt at an engine failed. `request_id`: of the decode attempt."""

    def attempt_retried(self, role: EngineRole) -> None:
        """Another attempt follows a failed one."""

    def asked_without_prefill(self) -> None:
        """Decode is told that no prefill engine is well. Once per client request."""

    @contextmanager
    def ticket_waits(self) -> Iterator[None]:
        """A ticket, from its post to the end of its prefill."""
        yield

    def prefilled(self, seconds: float) -> None:
        """A prefill succeeded and took `seconds`, the engine's queue included."""

    def first_token_after_prefill(self, seconds: float) -> None:
        """A stream's first token came `seconds` after the first prefill had ended."""
