# SPDX-License-Identifier: Apache-2.0
"""Serves the proxy's ports until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette

from vllm_ascend_pd.proxy.app import ProxyApp
from vllm_ascend_pd.proxy.http.connection_limiter import ConnectionLimiter
from vllm_ascend_pd.proxy.http.sockets import reserve_sockets
from vllm_ascend_pd.proxy.http.tls import Tls
from vllm_ascend_pd.proxy.settings import ProxySettings

log = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 5.0
"""For a TLS handshake. `connection_limiter.py` counts a connection only after it."""
_GRACEFUL_SHUTDOWN_SECONDS = 3
"""When the proxy stops, it ends all requests at once. This bounds the wait for clients that do not read those ends."""


class _Loop(uvloop.Loop):
    """An event loop whose TLS timeouts fit the proxy. uvloop's are a minute for a handshake, and 30 s for a slow client
    to read the rest of its answer."""

    def __init__(self, unread_timeout: float) -> None:
        super().__init__()
        self._unread_timeout = unread_timeout

    async def create_server(self, *args: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = _HANDSHAKE_SECONDS
            options["ssl_shutdown_timeout"] = self._unread_timeout
        return await super().create_server(*args, **options)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `serve`. uvicorn would wait until all requests end."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(SystemExit):  # it could not start, and uvicorn has logged why
            await super().serve(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError. Port 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def serve(settings: ProxySettings, listener: socket.socket, for_decode: socket.socket | None = None) -> bool:
    """Blocks until SIGINT or SIGTERM, and until every client has its answer or an error. Returns False if the proxy
    could not start or a background task failed; the log has the reason. `for_decode`: the metaserver's own port."""
    sockets = reserve_sockets(settings.max_concurrent, settings.max_waiting)
    settings = msgspec.structs.replace(settings, max_concurrent=sockets.concurrent, max_waiting=sockets.waiting)
    app = ProxyApp(settings)
    limiter = ConnectionLimiter(sockets.connections, sockets.idle, settings.read_timeout)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it logs each malformed request
    if not settings.metaserver_apart and settings.metaserver_token_file is None:
        log.warning(
            "any client that reaches this port may post tickets for its own requests: "
            "--metaserver-token-file or --metaserver-port prevent that"
        )
    server = partial(_server, limiter, sockets.backlog, settings.keep_alive_timeout)
    servers = [(server(app.for_clients, settings.tls, "on"), listener)]
    if for_decode is not None and app.for_decode is not None:
        servers.append((server(app.for_decode, settings.metaserver_tls, "off"), for_decode))

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        running = [asyncio.create_task(server.serve(sockets=[own])) for server, own in servers]
        ends = [asyncio.create_task(event.wait()) for event in (stopped, app.ended)]
        await asyncio.wait([*running, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            log.error("the proxy stops: it could not start, or one of its background tasks failed")
        app.shut_down()
        for server, _ in servers:
            server.should_exit = True
        ended = await asyncio.gather(*running, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, BaseException)]
        for error in errors:
            log.error("the proxy's server failed", exc_info=error)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return stopped.is_set() and not errors

    with contextlib.closing(_Loop(settings.read_timeout)) as loop:
        well = loop.run_until_complete(run())
        loop.run_until_complete(loop.shutdown_default_executor())
    return well


def _server(
    limiter: ConnectionLimiter,
    backlog: int,
    keep_alive_timeout: float,
    app: Starlette,
    tls: Tls | None,
    lifespan: Literal["on", "off"],
) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            lifespan=lifespan,
            http=limiter.protocol,
            ws="none",
            backlog=backlog,
            timeout_keep_alive=math.ceil(keep_alive_timeout),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_SECONDS,
            **({} if tls is None else tls.uvicorn_options()),
        )
    )
