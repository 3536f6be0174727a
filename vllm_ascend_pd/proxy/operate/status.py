# SPDX-License-Identifier: Apache-2.0
"""`GET /health`, and `GET /`: the status page with the JSON that it polls.

All of it is a snapshot of state that the proxy keeps anyway. The page itself contains nothing about the cluster. The
JSON has engines' addresses and reasons of failures. If there is an admin token, it needs that token; otherwise every
client can read it, like `/health` and `/metrics`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.messages import Action, BearerToken, guarded
from vllm_ascend_pd.proxy.rendezvous.observer import WINDOW_SECONDS, Observer, Percentiles, RecentFailure
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestPhase, RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.engine import RegisteredEngine
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.routing.load import LoadSnapshot
from vllm_ascend_pd.proxy.routing.registry import EngineRegistry

# Everything comes from this origin. The last two rules make sure that text is never parsed as HTML.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/status.css": ("status.css", "text/css"),
    "/status.js": ("status.js", "text/javascript"),
    "/status.svg": ("status.svg", "image/svg+xml"),
}
_MAX_TEXT_CHARS = 300


class EngineState(enum.Enum):
    """The state of an engine, from its health checks and its requests."""

    UNKNOWN = "unknown"
    """No check has ended yet. Or the engine was added after the start and has had no good check: others come first."""
    HEALTHY = "healthy"
    FAILING = "failing"
    """The last check failed. It still gets requests, until more checks fail."""
    PASSED_OVER = "passed over"
    """Checks are good, but requests failed there. Other engines come first."""
    EJECTED = "ejected"
    """Its checks fail: it gets requests only if no other is left."""


_CHECKS_FAIL = (EngineState.UNKNOWN, EngineState.FAILING, EngineState.EJECTED)


class Verdict(enum.Enum):
    OK = "ok"
    DEGRADED = "degraded"
    """An engine is not healthy, or a list of engines cannot be used."""
    UNAVAILABLE = "unavailable"
    """A role has no engine that is known to be healthy and may get requests."""


class EngineStatus(msgspec.Struct, frozen=True):
    id: str
    url: str
    state: EngineState
    reason: str | None
    """Why checks fail; None while they are good."""
    draining: bool
    in_flight: int
    """Requests of this proxy at the engine; for prefill, prompts."""
    seats_taken: int
    """As `--max-per-prefill` and `--max-per-decode` count."""
    tokens: int
    """The load that routing uses. Prefill: prompt tokens to compute. Decode: tokens whose KV it holds or will hold."""
    running: int | None
    """Running requests by the engine's own metrics, those of other clients included. This field and the next three are
    None if the engine reported nothing, or too long ago."""
    queued: int | None
    """Waiting requests, by its metrics."""
    kv_tokens: int | None
    """Tokens in its KV cache, by its metrics."""
    kv_capacity: int | None
    """Tokens that its KV cache can hold, by its metrics."""


class RoleStatus(msgspec.Struct, frozen=True):
    role: EngineRole
    seats_per_engine: int | None
    waiting: int
    """Requests for which no engine has a place."""
    retries: int
    failures: int
    engines: tuple[EngineStatus, ...]


class RequestStatus(msgspec.Struct, frozen=True):
    in_flight: int
    limit: int
    waiting: int
    """Requests beyond the limit, which wait to be served."""
    phases: Mapping[RequestPhase, int]


class LatencyStatus(msgspec.Struct, frozen=True):
    window_seconds: float
    first_token: Percentiles
    """From a stream's arrival to its first token."""
    prefill: Percentiles
    """From a ticket's arrival to the prefill engine's answer. KV is pushed during that time."""
    prefill_to_first_token: Percentiles
    """Of streams: the remaining transfer and decode's first step."""


class Status(msgspec.Struct, frozen=True):
    """Contains no secrets, no prompts and nothing else that a client sent."""

    version: str
    time: float
    """Seconds since 1970, as the times in `failures`."""
    verdict: Verdict
    problems: tuple[str, ...]
    """Problems with lists of engines, one line each."""
    requests: RequestStatus
    latency: LatencyStatus
    roles: tuple[RoleStatus, ...]
    failures: tuple[RecentFailure, ...]
    """The last failures, newest first."""


def snapshot(
    pools: Sequence[EnginePool],
    request_table: RequestTable,
    observer: Observer,
    problems: Sequence[str],
    *,
    version: str,
    now: float,
    wall: float,
) -> Status:
    """`now`: from `time.monotonic`. `wall`: from `time.time`."""
    roles = tuple(_role(pool, observer, now) for pool in pools)
    return Status(
        version,
        wall,
        _verdict(roles, problems),
        tuple(one_line(problem, _MAX_TEXT_CHARS) for problem in problems),
        RequestStatus(
            request_table.in_flight,
            request_table.admission.limit,
            request_table.admission.waiting,
            request_table.phases(),
        ),
        LatencyStatus(
            WINDOW_SECONDS,
            observer.recent_first_token.percentiles(now),
            observer.recent_prefill.percentiles(now),
            observer.recent_after_prefill.percentiles(now),
        ),
        roles,
        tuple(observer.recent_failures),
    )


def _role(pool: EnginePool, observer: Observer, now: float) -> RoleStatus:
    return RoleStatus(
        pool.role,
        pool.limiter.limit,
        pool.limiter.waiting,
        observer.retries[pool.role],
        observer.failures[pool.role].total(),
        tuple(_engine(pool, engine, now) for engine in pool.engines),
    )


def _engine(pool: EnginePool, engine: RegisteredEngine, now: float) -> EngineStatus:
    reported = pool.engines.reported(engine, now) or LoadSnapshot()
    state = _state(engine, now)
    return EngineStatus(
        engine.id,
        engine.url,
        state,
        one_line(engine.gate.reason, _MAX_TEXT_CHARS) or None if state in _CHECKS_FAIL else None,
        engine.draining,
        engine.sent.requests,
        pool.limiter.in_use(engine),
        pool.engines.load(engine, now).tokens,
        reported.running,
        reported.waiting,
        reported.kv_tokens,
        reported.capacity,
    )


def _state(engine: RegisteredEngine, now: float) -> EngineState:
    gate = engine.gate
    if gate.ejected:
        return EngineState.EJECTED
    if not gate.proven:
        return EngineState.UNKNOWN
    if gate.failing:
        return EngineState.FAILING
    if gate.passed_over(now):
        return EngineState.PASSED_OVER
    return EngineState.HEALTHY if gate.known else EngineState.UNKNOWN


def _verdict(roles: Sequence[RoleStatus], problems: Sequence[str]) -> Verdict:
    well = (EngineState.HEALTHY, EngineState.FAILING)  # a single failed check is tolerated
    if not all(any(engine.state in well and not engine.draining for engine in role.engines) for role in roles):
        return Verdict.UNAVAILABLE
    if problems or any(engine.state is not EngineState.HEALTHY for role in roles for engine in role.engines):
        return Verdict.DEGRADED
    return Verdict.OK


class StatusPage:
    def __init__(self, snapshot: Callable[[], Status], token: str | None) -> None:
        """`token`: the admin API's. None: every client may read the status."""
        self._snapshot = snapshot
        self._get: Action = self.get if token is None else guarded(BearerToken(token), self.get)

    def routes(self) -> list[BaseRoute]:
        return [
            *(Route(path, _file(name, media_type), methods=["GET"]) for path, (name, media_type) in _FILES.items()),
            Route("/status.json", self._get, methods=["GET"]),
        ]

    async def get(self, _: Request) -> Response:
        """200: `Status` as JSON."""
        return Response(msgspec.json.encode(self._snapshot()), media_type="application/json", headers=_HEADERS)


def _file(name: str, media_type: str) -> Action:
    content = files(__package__).joinpath("page", name).read_bytes()

    async def get(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return get


class Health:
    def __init__(self, pools: tuple[EnginePool, ...], observer: Observer, problems: Callable[[], list[str]]) -> None:
        self._pools = pools
        self._observer = observer
        self._problems = problems

    async def get(self, _: Request) -> Response:
        """200 if each role has an engine whose last check was good and that may get requests, else 503.

        The body has the result of each engine's last check, the reasons why engines get no requests, problems with
        lists of engines, and counts of failures and retries."""
        roles = {pool.role.value: pool.engines for pool in self._pools}
        usable = all(any(each.open and each.gate.last_check == "ok" for each in engines) for engines in roles.values())
        return JSONResponse(
            {
                "status": "ok" if usable else "unavailable",
                **{role: {each.url: each.gate.last_check for each in engines} for role, engines in roles.items()},
                "withheld": {role: _withheld(engines) for role, engines in roles.items()},
                "problems": self._problems(),
                "retries": {role.value: self._observer.retries[role] for role in EngineRole},
                "failures": {
                    role.value: {kind.value: number for kind, number in counted.items()}
                    for role, counted in self._observer.failures.items()
                },
            },
            status_code=HTTPStatus.OK if usable else HTTPStatus.SERVICE_UNAVAILABLE,
        )


def _withheld(engines: EngineRegistry) -> dict[str, str]:
    """Returns by URL why an engine gets no requests, or gets them only if no other is left."""
    reasons = {engine.url: "new: no health check was good yet" for engine in engines if not engine.gate.proven}
    reasons |= {engine.url: f"ejected: {engine.gate.reason}" for engine in engines if engine.gate.ejected}
    return reasons | {engine.url: "draining" for engine in engines if engine.draining}
