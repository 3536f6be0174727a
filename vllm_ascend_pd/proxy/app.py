# SPDX-License-Identifier: Apache-2.0
"""The proxy as ASGI applications: builds its parts and connects them."""

from __future__ import annotations

import asyncio
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
from starlette.routing import BaseRoute, Route

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.text import one_line
from vllm_ascend_pd.proxy.http.endpoints import NOT_SERVED
from vllm_ascend_pd.proxy.http.messages import BoundedBodies, RequestRefused, error_response
from vllm_ascend_pd.proxy.operate.status import StatusPage
from vllm_ascend_pd.proxy.rendezvous.client_endpoint import ClientRequests
from vllm_ascend_pd.proxy.rendezvous.metaserver import Metaserver
from vllm_ascend_pd.proxy.rendezvous.observer import Observer
from vllm_ascend_pd.proxy.rendezvous.request_table import RequestTable
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.checks import HealthChecks
from vllm_ascend_pd.proxy.routing.discovery import Discovery
from vllm_ascend_pd.proxy.routing.engine_pool import EnginePool
from vllm_ascend_pd.proxy.settings import ProxySettings

_MAX_ROUTE_CHARS = 200
"""Of a route in an error."""


class ProxyApp:
    """One proxy: its engines, its requests and its routes. The event loop's thread owns it."""

    def __init__(self, settings: ProxySettings) -> None:
        self._prefill, self._decode = self._pools = tuple(EnginePool(role, settings) for role in EngineRole)
        self._request_table = RequestTable(settings.max_concurrent, settings.max_waiting, settings.queue_timeout)
        roles = {pool.role: pool.engines for pool in self._pools}
        self._checks = HealthChecks(roles.values(), settings)
        self._discovery = Discovery(roles, settings)
        self.ended = asyncio.Event()
        """Set when the background tasks have ended. uvicorn logs the reason if one of them failed."""
        self._observer = Observer(self._request_table, self._pools)
        self.asgi = Starlette(
            middleware=[Middleware(BoundedBodies)],
            routes=self._routes(settings),
            exception_handlers={HTTPException: _http_error, RequestRefused: _refused},
            lifespan=self._lifespan,
        )
        """The application. Its lifespan runs the background tasks."""

    def shut_down(self) -> None:
        """Ends all requests with an error, and refuses further ones."""
        self._request_table.shut_down()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Does the work beside requests. A task that fails ends the proxy."""
        try:
            await self._discovery.look()
            for pool in self._pools:
                pool.engines.require_checks()
            async with anyio.create_task_group() as tasks:
                for run in (self._discovery.run, *(pool.watch.run for pool in self._pools), self._checks.run):
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
        return [
            *ClientRequests(table, self._decode, self._prefill, observer, settings).routes(),
            *(Route(path, partial(_not_served, why), methods=["GET", "POST"]) for path, why in NOT_SERVED.items()),
            Route("/metrics", observer.metrics, methods=["GET"]),
            *StatusPage(self._pools, table, observer, self._discovery.problems, token).routes(),
            *Metaserver(table, self._prefill, observer, settings).routes(),
        ]


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
