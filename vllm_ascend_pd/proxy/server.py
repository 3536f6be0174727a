# SPDX-License-Identifier: Apache-2.0
"""The proxy as one process: builds its parts into an ASGI application, and serves it by uvicorn until SIGINT or
SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, cast

import anyio
import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from vllm_ascend_pd.core.hosts import is_loopback
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.arriving import BodyBudget, BoundedBodies
from vllm_ascend_pd.proxy.http.connections import BEYOND_LIMIT, BoundedRequests, HttpConnection, OpenConnections
from vllm_ascend_pd.proxy.http.endpoints import NOT_SERVED
from vllm_ascend_pd.proxy.http.messages import RequestRefused, error_response
from vllm_ascend_pd.proxy.operate.status import StatusPage
from vllm_ascend_pd.proxy.rendezvous.client_endpoint import ClientRequests
from vllm_ascend_pd.proxy.rendezvous.deliveries import Deliveries
from vllm_ascend_pd.proxy.rendezvous.metaserver import Metaserver
from vllm_ascend_pd.proxy.rendezvous.observer import ProxyObserver
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.dispatch import EnginePool
from vllm_ascend_pd.proxy.routing.polling import Discovery, HealthChecks
from vllm_ascend_pd.proxy.settings import MIB, ProxySettings
from vllm_ascend_pd.transport.names import HostNames

log = logging.getLogger(__name__)

_GRACEFUL_SHUTDOWN_SECONDS = 3
"""When the proxy stops, it ends all requests at once. This bounds the wait for clients that do not read those ends."""
_BACKLOG = 4096
"""New connections that may wait to be accepted: Linux's own limit."""
_FILES_PER_BACKLOG = 8
"""The backlog gets at most one of so many files: uvicorn accepts all its connections at once."""
_PER_REQUEST = 4
"""Incoming connections per request, and as many outgoing ones, for three prompts. A request has one connection to its
client and one to a decode engine. Each of its prompts adds one for the ticket and one to a prefill engine."""
_MIN_IDLE = 1024
"""Incoming connections without a request, where few requests are served: gateways keep some open."""
_SPARE_FILES = 256
"""For everything else that the process opens, `BEYOND_LIMIT` included."""

_LONGEST_USER_TIMEOUT_MS = (1 << 31) - 1
"""Of TCP_USER_TIMEOUT (tcp(7))."""
_MAX_ROUTE_CHARS = 200
"""Of a route in an error."""


class ProxyApp:
    """One proxy: its engines, its requests and its routes. The event loop's thread owns it."""

    def __init__(self, settings: ProxySettings) -> None:
        names = HostNames()
        self._prefill, self._decode = self._pools = tuple(EnginePool(role, settings, names) for role in EngineRole)
        self._request_table = RequestTable(settings.max_concurrent, settings.max_waiting, settings.queue_timeout)
        roles = {pool.role: pool.engines for pool in self._pools}
        self._checks = HealthChecks(roles.values(), settings, names)
        self._discovery = Discovery(roles, settings, names)
        self.ended = asyncio.Event()
        """Set when the background tasks have ended. uvicorn logs the reason if one of them failed."""
        self._observer = ProxyObserver(self._request_table, self._pools)
        self._deliveries = Deliveries(self._prefill, self._decode, self._observer, settings.eject_after)
        self._budget = BodyBudget(settings.max_bodies_mib * MIB)
        self.asgi = Starlette(
            middleware=[Middleware(BoundedBodies, budget=self._budget)],
            routes=self._routes(settings),
            exception_handlers={HTTPException: _http_error, RequestRefused: _refused},
            lifespan=self._lifespan,
        )
        """The application. Its lifespan runs the background tasks."""
        self.asgi.router.redirect_slashes = False  # it would redirect to whatever host the client names

    def shut_down(self) -> None:
        """Ends all requests with an error, and refuses further ones."""
        self._request_table.shut_down()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Does the work beside requests. A task that fails ends the proxy."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._discovery.run)
                await self._discovery.first_results()
                for pool in self._pools:
                    pool.engines.require_checks()
                for run in (*(pool.watch.run for pool in self._pools), self._checks.run):
                    tasks.start_soon(run)
                await self._checks.first_results()  # so `/health` is right from the first request on
                yield
                tasks.cancel_scope.cancel()
        finally:
            self.ended.set()
            self.shut_down()
            for pool in self._pools:
                await pool.aclose()

    def _routes(self, settings: ProxySettings) -> list[BaseRoute]:
        table, observer, token = self._request_table, self._observer, settings.admin_token()
        prefill, decode, deliveries = self._prefill, self._decode, self._deliveries
        return [  # they are compared in this order, those of most requests first
            *Metaserver(table, prefill, decode, deliveries, observer, settings).routes(),
            *ClientRequests(table, decode, prefill, deliveries, observer, self._budget, settings).routes(),
            *(Route(path, partial(_not_served, why), methods=["GET", "POST"]) for path, why in NOT_SERVED.items()),
            Route("/metrics", observer.metrics, methods=["GET"]),
            *StatusPage(self._pools, table, observer, self._problems, token).routes(),
        ]

    def _problems(self) -> Mapping[str, str]:
        """What is wrong beside single engines: lists of engines, and pairs that do not fit each other."""
        return {**self._discovery.problems, **self._deliveries.problems()}


async def _not_served(reason: str, _: Request) -> Response:
    """404: OpenAI's SDKs would retry a 501."""
    return error_response(HTTPStatus.NOT_FOUND, f"this proxy does not serve this route: {reason}")


async def _refused(request: Request, error: Exception) -> Response:
    """The metaserver's errors are `{"error": reason}`, those of other routes as OpenAI's clients read them."""
    assert isinstance(error, RequestRefused)
    if request.url.path.startswith(METASERVER_PATH):
        return JSONResponse({"error": error.message}, error.status)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors, 404 and 405, as OpenAI's clients read them."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    route = one_line(f"{request.method} {request.url.path}", _MAX_ROUTE_CHARS)
    return error_response(status, f"{status.phrase}: this proxy does not serve {route}", headers=error.headers)


class Capacity(NamedTuple):
    """What the process's limit of open files allows."""

    concurrent: int
    """Requests that are served at a time."""
    waiting: int
    """Requests that wait to be served. Each holds its client's connection."""
    connections: int
    """Incoming connections with a request. Those on further ones get 503, except `/health`."""
    backlog: int
    """New connections that wait to be accepted."""


def capacity(files: int, concurrent: int, waiting: int) -> Capacity:
    """Divides `files` for the wanted numbers of requests. If they are too few, fewer requests may wait, and then fewer
    are served."""
    backlog = max(1, min(_BACKLOG, files // _FILES_PER_BACKLOG))
    left = max(0, files - backlog - _SPARE_FILES)
    incoming = max(concurrent * _PER_REQUEST, _MIN_IDLE)
    served = incoming + concurrent * _PER_REQUEST
    share = min(1.0, left / served)
    may_wait = max(0, min(waiting, left - served))
    connections = max(_PER_REQUEST, int(share * incoming)) + may_wait
    return Capacity(max(1, int(share * concurrent)), may_wait, connections, backlog)


def reserve_files(concurrent: int, waiting: int) -> Capacity:
    """Raises the limit of open files to the hard limit, and divides it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = capacity(sys.maxsize if hard == resource.RLIM_INFINITY else hard, concurrent, waiting)
    if (found.concurrent, found.waiting) != (concurrent, waiting):
        # Thousands that wait are seldom needed.
        log.log(
            logging.INFO if found.concurrent == concurrent else logging.WARNING,
            "the hard limit of %d open files (ulimit -Hn) does not allow --max-concurrent %d and --max-waiting %d: "
            "%d requests are served at a time, and %d others wait",
            *(hard, concurrent, waiting, found.concurrent, found.waiting),
        )
    return found


def warn_of_posts(settings: ProxySettings) -> None:
    """Logs a warning if hosts may post tickets that hold no secret."""
    if not settings.metaserver_tokens() and not is_loopback(settings.host):
        log.warning(
            "any client that reaches this port may post tickets for its own requests: the cluster's secret "
            "(--secret-file) prevents that"
        )


def listen(host: str, port: int, read_timeout: float) -> socket.socket:
    """Port 0 takes a free port. Raises OSError.

    The kernel ends the connection of a client that reads nothing of its answer for `read_timeout` seconds. uvicorn
    would keep the connection and the unread answer for ever.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    # Before anybody connects: connections inherit this when they are accepted by the kernel.
    milliseconds = int(min(max(read_timeout, 0.0) * 1000, _LONGEST_USER_TIMEOUT_MS))  # `ProxySettings` refuses others
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `serve`. uvicorn would wait until all requests end."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(SystemExit):  # it could not start, and uvicorn has logged why
            await super().serve(sockets)


def serve(settings: ProxySettings, listener: socket.socket) -> bool:
    """Blocks until SIGINT or SIGTERM, and until every client has its answer or an error. Returns False if the proxy
    could not start or a background task failed; the log has the reason."""
    found = reserve_files(settings.max_concurrent, settings.max_waiting)
    settings = msgspec.structs.replace(settings, max_concurrent=found.concurrent, max_waiting=found.waiting)
    app = ProxyApp(settings)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it logs each malformed request
    warn_of_posts(settings)
    open_connections = OpenConnections(found.connections + BEYOND_LIMIT)
    server = _Server(
        uvicorn.Config(
            BoundedRequests(app.asgi, found.connections),
            lifespan="on",
            http=cast("type[asyncio.Protocol]", partial(HttpConnection, open_connections)),
            ws="none",
            backlog=found.backlog,
            timeout_keep_alive=math.ceil(settings.keep_alive_timeout),
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nothing here asks for the client's address
            timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_SECONDS,
        )
    )

    gc.collect()
    gc.freeze()  # a full collection of all modules would stop the event loop for 50 ms and more

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        ends = [asyncio.create_task(event.wait()) for event in (stopped, app.ended)]
        await asyncio.wait([running, *ends], return_when=asyncio.FIRST_COMPLETED)
        if stopped.is_set():
            log.info("the proxy stops: its requests end with an error (503)")
        else:
            log.error("the proxy stops: it could not start, or one of its background tasks failed")
        app.shut_down()
        server.should_exit = True
        [error] = await asyncio.gather(running, return_exceptions=True)
        if error is not None:
            log.error("the proxy's server failed", exc_info=error)
        log.info("the proxy has stopped")
        return stopped.is_set() and error is None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # it cancels the tasks that are left
        return runner.run(run())
