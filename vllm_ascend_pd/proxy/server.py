# SPDX-License-Identifier: Apache-2.0
"""Runs the proxy until it is told to stop."""

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

from vllm_ascend_pd.proxy.app import create_app
from vllm_ascend_pd.proxy.http.connection_limiter import ConnectionLimiter
from vllm_ascend_pd.proxy.http.sockets import take
from vllm_ascend_pd.proxy.http.tls import Tls
from vllm_ascend_pd.proxy.settings import ProxySettings

log = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 5.0
# Requests end at once when the proxy stops; this bounds the wait for clients that do not read their ends.
_GRACEFUL_SHUTDOWN_SECONDS = 3


class _Loop(uvloop.Loop):
    """Behind TLS: uvicorn leaves the handshake a minute, and a connection is counted behind it; and who reads slowly
    half a minute for what is left of an answer, where `connection_limiter.py` leaves it `patience`."""

    patience = 30.0  # as uvloop has it

    async def create_server(self, *args: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = _HANDSHAKE_SECONDS
            options["ssl_shutdown_timeout"] = self.patience
        return await super().create_server(*args, **options)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would wait for running requests, however long they take: `serve` handles signals instead."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with contextlib.suppress(SystemExit):  # it could not start, and has logged why
            await super().serve(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError. Port 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def serve(settings: ProxySettings, listener: socket.socket, for_decode: socket.socket | None = None) -> bool:
    """Blocks until SIGINT or SIGTERM; by then every client has its answer or an error. False: it could not start, or a
    background task failed; the log says why. `for_decode`: the metaserver's own port."""
    sockets = take(settings.max_concurrent, settings.max_waiting)
    settings = msgspec.structs.replace(settings, max_concurrent=sockets.concurrent, max_waiting=sockets.waiting)
    app = create_app(settings)
    app.state.limiter = ConnectionLimiter(sockets.connections, sockets.idle, settings.read_timeout)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a line for each wrong request of a stranger's: counted
    if not settings.metaserver_apart and settings.metaserver_token_file is None:
        log.warning(
            "whoever reaches this port may post tickets, clients for requests of their own: "
            "--metaserver-token-file or --metaserver-port keep them from that"
        )
    server = partial(_server, app.state.limiter, sockets.backlog, settings.keep_alive_timeout)
    servers = [(server(app, settings.tls, "on"), listener)]
    if for_decode is not None:
        servers.append((server(app.state.metaserver, settings.metaserver_tls, "off"), for_decode))

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told.set)
        running = [asyncio.create_task(server.serve(sockets=[own])) for server, own in servers]
        ends = [asyncio.create_task(event.wait()) for event in (told, app.state.ended)]
        await asyncio.wait([*running, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not told.is_set():
            log.error("the proxy ends: it could not start, or a background task of its own failed")
        app.state.request_table.shut_down()
        for server, _ in servers:
            server.should_exit = True
        ended = await asyncio.gather(*running, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, BaseException)]
        for error in errors:
            log.error("the proxy's server ended by an error", exc_info=error)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return told.is_set() and not errors

    with contextlib.closing(_Loop()) as loop:
        loop.patience = settings.read_timeout
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
