# SPDX-License-Identifier: Apache-2.0
"""The proxy as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_ascend_pd import __version__
from vllm_ascend_pd.core.signing import resigned
from vllm_ascend_pd.proxy.http.cross_origin import CrossOrigin
from vllm_ascend_pd.proxy.http.endpoints import DECODE_ALONE_GET, DECODE_ALONE_POST, NOT_SERVED, Endpoint
from vllm_ascend_pd.proxy.http.errors import error_response
from vllm_ascend_pd.proxy.operate.admin import COMMAND_LINE, Admin
from vllm_ascend_pd.proxy.operate.counts import Counts
from vllm_ascend_pd.proxy.operate.health import Health
from vllm_ascend_pd.proxy.operate.metrics import Metrics
from vllm_ascend_pd.proxy.operate.observer import OperatorObserver
from vllm_ascend_pd.proxy.operate.status import Status, snapshot
from vllm_ascend_pd.proxy.operate.status_page import StatusPage
from vllm_ascend_pd.proxy.operate.tracing import start_tracing
from vllm_ascend_pd.proxy.rendezvous.client_endpoint import ClientEndpoint
from vllm_ascend_pd.proxy.rendezvous.decode_requests import DecodeRequests
from vllm_ascend_pd.proxy.rendezvous.metaserver import Metaserver
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.concurrency import ConcurrencyLimiter
from vllm_ascend_pd.proxy.routing.discovery import Discovery
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool, make_pool
from vllm_ascend_pd.proxy.routing.engines_file import EnginesFile
from vllm_ascend_pd.proxy.routing.health_checks import HealthChecks
from vllm_ascend_pd.proxy.routing.registry import EngineRole
from vllm_ascend_pd.proxy.routing.stall_watch import StallWatch
from vllm_ascend_pd.proxy.settings import ProxySettings

_PREFILLS_PER_REQUEST = 4
"""A request with several prompts or samples (n) has several prefills. If there are more per request, on average,
tickets wait for a connection, and fail after `connect_timeout`."""
_MISSED_CHECKS = 3
"""After so many failed checks, an engine's last reported load is too old."""


def create_app(settings: ProxySettings) -> Starlette:
    """`app.state.request_table.shut_down()` ends all requests; the server calls it when it stops.
    `app.state.metaserver` is the application of the metaserver's own port, if it has one. `app.state.ended` is set when
    the proxy's background tasks have ended: without being told to when one of them failed, which uvicorn logs."""

    def pool(role: EngineRole, requests: int, per_engine: int | None, timeout: float) -> EnginePool:
        return make_pool(
            role,
            strategy=settings.strategy,
            limiter=ConcurrencyLimiter(per_engine, settings.queue_per_engine, settings.queue_timeout),
            eject_after=settings.eject_after,
            return_after=settings.return_after,
            max_connections=requests,
            connect_timeout=settings.connect_timeout,
            read_timeout=timeout,
            fresh_for=_MISSED_CHECKS * settings.check_interval + 2 * settings.health_timeout,
        )

    prefills = settings.max_concurrent * _PREFILLS_PER_REQUEST
    prefill = pool(EngineRole.PREFILL, prefills, settings.max_per_prefill, settings.silence_timeout)
    decode = pool(EngineRole.DECODE, settings.max_concurrent, settings.max_per_decode, settings.silence_timeout)
    prefill_watch = StallWatch(
        prefill,
        probe_timeout=settings.probe_timeout,
        stall_timeout=settings.read_timeout,
        idle_timeout=settings.prefill_timeout,
    )
    decode_watch = StallWatch(
        decode,
        probe_timeout=settings.probe_timeout,
        stall_timeout=settings.read_timeout,
        quiet=settings.probe_timeout,
    )
    checks = HealthChecks(
        (prefill.engines, decode.engines), interval=settings.check_interval, timeout=settings.health_timeout
    )
    discovery = Discovery({pool.role: pool.engines for pool in (prefill, decode)}, settings.dns_interval)
    discovery.listed(COMMAND_LINE, settings.engines())
    file = None
    if settings.engines_file is not None:
        file = EnginesFile(settings.engines_file, partial(discovery.listed, "the engines file"))
    request_table = RequestTable(settings.max_concurrent, settings.max_waiting, settings.queue_timeout)
    counts = Counts()

    def problems() -> list[str]:
        of_lists = [f"{source}: {problem}" for source, problem in discovery.problems.items()]
        return of_lists if file is None or file.problem is None else [*of_lists, file.problem]

    health = Health((prefill, decode), counts, problems, settings.health_timeout)
    metrics = Metrics(request_table, counts, (prefill, decode), health.states)
    tracing = start_tracing(settings.otlp_traces_endpoint)
    observer = OperatorObserver(counts, metrics, tracing)
    decode_requests = DecodeRequests(
        request_table,
        decode,
        decode_watch,
        observer,
        attempts=settings.decode_attempts,
        metaserver_url=settings.metaserver_url,
    )
    client_endpoint = partial(
        ClientEndpoint,
        request_table=request_table,
        decode_requests=decode_requests,
        observer=observer,
        max_body_bytes=settings.max_body_bytes,
        read_timeout=settings.read_timeout,
    )
    secret = settings.ticket_secret()
    sign = None if secret is None else lambda ticket, attempt: resigned(ticket, secret, attempt)
    metaserver = Metaserver(
        request_table,
        prefill,
        prefill_watch,
        observer,
        token=settings.metaserver_token(),
        read_timeout=settings.read_timeout,
        max_ticket_bytes=settings.max_ticket_bytes,
        prefill_attempts=settings.prefill_attempts,
        sign=sign,
    )
    token = settings.admin_token()
    admin = [] if token is None else Admin((prefill, decode), request_table, token).routes()

    def status() -> Status:
        return snapshot(
            (prefill, decode),
            request_table,
            counts,
            metrics,
            problems(),
            version=__version__,
            now=time.monotonic(),
            wall=time.time(),
        )

    ended = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            if file is not None:
                await file.start()
            await discovery.look()
            for each in (prefill, decode):
                each.engines.require_checks()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(discovery.run)
                if file is not None:
                    tasks.start_soon(file.run)
                tasks.start_soon(prefill_watch.run)
                tasks.start_soon(decode_watch.run)
                tasks.start_soon(checks.run)
                yield
                tasks.cancel_scope.cancel()
        finally:
            ended.set()
            request_table.shut_down()
            await prefill.aclose()
            await decode.aclose()
            await anyio.to_thread.run_sync(tracing.close)

    for_decode = metaserver.routes()
    for_clients = (*(each.value for each in Endpoint), *DECODE_ALONE_GET, *DECODE_ALONE_POST, *NOT_SERVED)
    app = Starlette(
        middleware=[
            Middleware(
                CrossOrigin,
                paths=for_clients,
                allow_origins=settings.allowed_origins,
                allow_methods=settings.allowed_methods,
                allow_headers=settings.allowed_headers,
                allow_credentials=settings.allow_credentials,
            )
        ],
        routes=[
            *(Route(each.value, client_endpoint(each.value, each), methods=["POST"]) for each in Endpoint),
            *(Route(path, client_endpoint(path, None), methods=["GET"]) for path in DECODE_ALONE_GET),
            *(Route(path, client_endpoint(path, None), methods=["POST"]) for path in DECODE_ALONE_POST),
            *(Route(path, partial(_not_served, why), methods=["GET", "POST"]) for path, why in NOT_SERVED.items()),
            *([] if settings.metaserver_apart else for_decode),
            Route("/health", health.get, methods=["GET"]),
            Route("/metrics", metrics.get, methods=["GET"]),
            *StatusPage(status, token).routes(),
            *admin,
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.request_table = request_table
    app.state.ended = ended
    if settings.metaserver_apart:
        app.state.metaserver = Starlette(routes=for_decode, exception_handlers={HTTPException: _http_error})
    return app


async def _not_served(reason: str, _: Request) -> Response:
    return error_response(HTTPStatus.NOT_IMPLEMENTED, f"this proxy does not serve this route: {reason}")


async def _http_error(_: Request, error: Exception) -> Response:
    """Starlette's own refusals (404, 405), in the shape that engines give them."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)
