# SPDX-License-Identifier: Apache-2.0
"""For operators: `GET /health`, the status page with the JSON that it polls, and the admin API, which lists, adds,
drains and removes engines.

What is shown is a snapshot of state that the proxy keeps anyway. The page itself contains nothing about the cluster.
The JSON has engines' addresses and reasons of failures. If there is an admin token, it needs that token; otherwise
every client can read it, like `/health` and `/metrics`.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from vllm_ascend_pd import __version__
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.connections import HEALTH
from vllm_ascend_pd.proxy.http.messages import Action, RequestRefused, guarded
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver, RecentFailure
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestPhase, RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole, FailureKind
from vllm_ascend_pd.proxy.routing.dispatch import EnginePool
from vllm_ascend_pd.proxy.routing.engines import (
    USABLE,
    EngineRegistry,
    EngineState,
    RegisteredEngine,
    TooManyEnginesError,
)
from vllm_ascend_pd.proxy.routing.polling import COMMAND_LINE
from vllm_ascend_pd.proxy.settings import check_engine_url

log = logging.getLogger(__name__)

ADMIN_PATH = "/admin/engines"
ADMIN = "the admin API"
_MAX_BODY_BYTES = 64 * 1024

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


class Verdict(enum.Enum):
    OK = "ok"
    DEGRADED = "degraded"
    """An engine is not healthy, a list of engines cannot be used, or two engines do not fit each other."""
    UNAVAILABLE = "unavailable"
    """A role has no engine that can be expected to answer."""


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine, on the status page and in the admin API."""

    id: str
    role: EngineRole
    url: str
    state: EngineState
    reason: str | None
    """Why it is in this state; None if it is healthy or drains."""
    listed_by: tuple[str, ...]
    """The command line, DNS names, the admin API."""
    in_flight: int
    """Requests of this proxy at the engine; for prefill, prompts."""
    seats_taken: int
    """As `--max-per-prefill` and `--max-per-decode` count."""
    tokens: int
    """The load that routing uses. Prefill: prompt tokens to compute. Decode: tokens whose KV it holds or will hold."""
    running: int | None
    """Running requests by the engine's own metrics, those of other clients included. This field and those after it are
    None if the engine reported nothing, or too long ago."""
    queued: int | None
    """Waiting requests, by its metrics."""
    kv_tokens: int | None
    """Tokens in its KV cache, by its metrics."""
    kv_capacity: int | None
    """Tokens that its KV cache can hold, by its metrics."""
    wrong_kv: int | None
    """How often `verify_kv` has found wrong KV there, by its metrics."""
    kv_waiting: float | None
    """Decode: the share of its KV cache that requests have whose KV has not arrived, by its metrics."""

    @property
    def line(self) -> str:
        return self.state.value if self.reason is None else f"{self.state.value}: {self.reason}"


class RoleStatus(msgspec.Struct, frozen=True):
    role: EngineRole
    seats_per_engine: int | None
    waiting: int
    """Requests for which no engine has a free slot."""
    retries: int
    failures: int
    engines: tuple[EngineStatus, ...]


class RequestStatus(msgspec.Struct, frozen=True):
    in_flight: int
    limit: int | None
    waiting: int
    """Requests beyond the limit, which wait to be served."""
    phases: Mapping[RequestPhase, int]


class Status(msgspec.Struct, frozen=True):
    """Contains no secrets, no prompts and nothing else that a client sent."""

    version: str
    time: float
    """Seconds since 1970, as the times in `failures`."""
    verdict: Verdict
    problems: tuple[str, ...]
    """Problems with lists of engines, and with pairs of engines between which no KV arrives, one line each."""
    requests: RequestStatus
    roles: tuple[RoleStatus, ...]
    failures: tuple[RecentFailure, ...]
    """The last failures, newest first."""


class Health(msgspec.Struct, frozen=True):
    """For probes and scripts."""

    status: Verdict
    prefill: Mapping[str, str]
    """The state of each engine by its URL, with the reason: `ejected: HTTP 503`."""
    decode: Mapping[str, str]
    problems: tuple[str, ...]


def engine_status(pool: EnginePool, engine: RegisteredEngine) -> EngineStatus:
    now = time.monotonic()
    reported = pool.engines.reported_load(engine, now)
    state, reason = engine.state(now)
    return EngineStatus(
        engine.id,
        engine.role,
        engine.url,
        state,
        None if reason is None else one_line(reason, _MAX_TEXT_CHARS),
        tuple(sorted(engine.sources)),
        engine.sent.requests,
        engine.slots_used,
        pool.engines.load(engine, now).tokens,
        reported.running,
        reported.waiting,
        reported.kv_tokens,
        reported.capacity,
        reported.wrong_kv,
        reported.kv_waiting,
    )


class _NewEngine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: EngineRole
    url: str


_read_new = msgspec.json.Decoder(_NewEngine).decode


class StatusPage:
    def __init__(
        self,
        pools: Sequence[EnginePool],
        request_table: RequestTable,
        observer: ProxyObserver,
        problems: Callable[[], Mapping[str, str]],
        token: str | None,
    ) -> None:
        """`problems`: of lists of engines and of pairs, by their names. `token`: the admin API's. None: there is none,
        and every client may read the status."""
        self._pools = {pool.role: pool for pool in pools}
        self._request_table = request_table
        self._observer = observer
        self._problems = problems
        self._token = token

    def routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            *(Route(path, _file(name, media_type), methods=["GET"]) for path, (name, media_type) in _FILES.items()),
            Route(HEALTH, self.health, methods=["GET"]),
        ]
        if self._token is None:
            return [*routes, Route("/status.json", self.get, methods=["GET"])]
        for_operators = (
            ("GET", "/status.json", self.get),
            ("GET", ADMIN_PATH, self.list),
            ("POST", ADMIN_PATH, self.add),
            ("POST", ADMIN_PATH + "/{id}:drain", self.drain),
            ("POST", ADMIN_PATH + "/{id}:undrain", self.undrain),
            ("DELETE", ADMIN_PATH + "/{id}", self.remove),
        )
        guard = partial(guarded, (self._token,), "admin token")
        return [*routes, *(Route(path, guard(action), methods=[method]) for method, path, action in for_operators)]

    async def get(self, _: Request) -> Response:
        """200: `Status` as JSON."""
        return Response(msgspec.json.encode(self.status()), media_type="application/json", headers=_HEADERS)

    async def health(self, _: Request) -> Response:
        """200 with `Health` if each role has an engine that can be expected to answer, else 503 with the same."""
        status = self.status()
        prefill, decode = ({engine.url: engine.line for engine in role.engines} for role in status.roles)
        code = HTTPStatus.SERVICE_UNAVAILABLE if status.verdict is Verdict.UNAVAILABLE else HTTPStatus.OK
        return _json(Health(status.verdict, prefill, decode, status.problems), code)

    def status(self) -> Status:
        queue = self._request_table.queue
        problems = tuple(one_line(f"{source}: {each}", _MAX_TEXT_CHARS) for source, each in self._problems().items())
        roles = tuple(self._role(pool) for pool in self._pools.values())
        return Status(
            __version__,
            time.time(),
            _verdict(roles, problems),
            problems,
            RequestStatus(self._request_table.in_flight, queue.limit, queue.waiting, self._request_table.phases()),
            roles,
            tuple(self._observer.recent_failures),
        )

    def _role(self, pool: EnginePool) -> RoleStatus:
        return RoleStatus(
            pool.role,
            pool.queue.limit,
            pool.queue.waiting,
            self._observer.retries[pool.role],
            sum(self._observer.failures[pool.role, kind] for kind in FailureKind),
            tuple(engine_status(pool, engine) for engine in pool.engines),
        )

    # The admin API.

    async def list(self, _: Request) -> Response:
        """200: `{"engines": [...]}`, each as `EngineStatus`."""
        engines = [engine_status(pool, each) for pool in self._pools.values() for each in pool.engines]
        return _json({"engines": engines})

    async def add(self, request: Request) -> Response:
        """Takes `{"role": "prefill", "url": "http://..."}`. 201 with the engine; 400; 409 if the engine exists already,
        or there are too many."""
        new = await self._request_table.read(request, _MAX_BODY_BYTES, _read_new, "new engine")
        try:
            url = check_engine_url(new.role.value, new.url, ("http", "https"))
        except ValueError as error:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, str(error)) from None
        engines = self._pools[new.role].engines
        if engines.get(url) is not None:
            raise RequestRefused(HTTPStatus.CONFLICT, f"{new.role.value} engine {url} exists already")
        try:
            engine = engines.add(url, ADMIN)
        except TooManyEnginesError as full:
            raise RequestRefused(HTTPStatus.CONFLICT, str(full)) from None
        return self._show(engine, HTTPStatus.CREATED)

    async def drain(self, request: Request) -> Response:
        """200 with the engine. It gets no more requests; those that it has go on."""
        engines, engine = self._find(request)
        engines.drain(engine)
        return self._show(engine)

    async def undrain(self, request: Request) -> Response:
        engines, engine = self._find(request)
        engines.undrain(engine)
        return self._show(engine)

    async def remove(self, request: Request) -> Response:
        """200 with the engine as it was. Its requests go on. 409 if the engine would come back, because a DNS name
        lists it."""
        engines, engine = self._find(request)
        listed = engine.sources - {COMMAND_LINE, ADMIN}
        if listed:
            raise RequestRefused(
                HTTPStatus.CONFLICT, f"{', '.join(sorted(listed))} lists this engine: drain it here, or remove it there"
            )
        shown = self._show(engine)
        engines.remove(engine)
        log.info("%s engine %s: removed by %s", engine.role.value, engine.url, ADMIN)
        return shown

    def _find(self, request: Request) -> tuple[EngineRegistry, RegisteredEngine]:
        for pool in self._pools.values():
            engine = pool.engines.by_id(request.path_params["id"])
            if engine is not None:
                return pool.engines, engine
        raise RequestRefused(HTTPStatus.NOT_FOUND, "no engine has this id")

    def _show(self, engine: RegisteredEngine, status: HTTPStatus = HTTPStatus.OK) -> Response:
        return _json(engine_status(self._pools[engine.role], engine), status)


def _json(body: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _verdict(roles: Sequence[RoleStatus], problems: Sequence[str]) -> Verdict:
    states = [[engine.state for engine in role.engines] for role in roles]
    if not all(any(state in USABLE for state in each) for each in states):
        return Verdict.UNAVAILABLE
    fine = (EngineState.HEALTHY, EngineState.DRAINING)  # the operator wants the latter
    return Verdict.OK if not problems and all(state in fine for each in states for state in each) else Verdict.DEGRADED


def _file(name: str, media_type: str) -> Action:
    content = files(__package__).joinpath("page", name).read_bytes()

    async def get(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return get
