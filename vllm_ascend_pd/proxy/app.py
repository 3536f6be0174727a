# SPDX-License-Identifier: Apache-2.0
"""The proxy as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_ascend_pd.core.protocol import METASERVER_PATH

from .bodies import Endpoint
from .engines import EnginePool, Role
from .errors import error_response
from .exchange import Exchanges
from .forward import Forward
from .health import Health
from .metaserver import Metaserver
from .settings import ProxySettings, without_slash

# A request with several prompts or several samples (n) has several prefills. Beyond this many per request, on
# average, tickets wait `connect_timeout` for their turn and then fail.
_PREFILLS_PER_REQUEST = 4


def create_app(settings: ProxySettings) -> Starlette:
    """`app.state.exchanges.shut_down()` ends all requests; the server calls it when it is told to stop."""

    def pool(role: Role, urls: tuple[str, ...], requests: int) -> EnginePool:
        return EnginePool(
            role,
            without_slash(urls),
            max_connections=requests + len(urls),  # one for each engine's health probe
            connect_timeout=settings.connect_timeout,
            read_timeout=settings.read_timeout,
        )

    prefill = pool(Role.PREFILL, settings.prefill, settings.max_concurrent * _PREFILLS_PER_REQUEST)
    decode = pool(Role.DECODE, settings.decode, settings.max_concurrent)
    exchanges = Exchanges(limit=settings.max_concurrent)
    forward = partial(Forward, settings=settings, exchanges=exchanges, decode=decode)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await prefill.aclose()
            await decode.aclose()

    app = Starlette(
        routes=[
            *(Route(each.value, forward(each.value, each), methods=["POST"]) for each in Endpoint),
            Route("/v1/models", forward("/v1/models", None), methods=["GET"]),
            Route(METASERVER_PATH, Metaserver(settings, exchanges, prefill).post_ticket, methods=["POST"]),
            Route("/health", Health((prefill, decode), settings.health_timeout).get, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.exchanges = exchanges
    return app


async def _http_error(_: Request, error: Exception) -> Response:
    """Starlette's own refusals (404, 405) in the same shape as all others."""
    assert isinstance(error, HTTPException)
    return error_response(HTTPStatus(error.status_code), error.detail, headers=error.headers)
