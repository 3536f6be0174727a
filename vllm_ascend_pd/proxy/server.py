# SPDX-License-Identifier: Apache-2.0
"""Runs the proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn

from .app import create_app
from .settings import ProxySettings

# Requests end at once when the proxy stops; this bounds the wait for clients that do not read their ends.
_GRACEFUL_SHUTDOWN_SECONDS = 3
# A request holds four sockets: client, decode engine, its ticket, prefill engine.
_SOCKETS_PER_REQUEST = 4


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would wait for running requests, however long they take: `serve` handles signals instead."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError. Port 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def serve(settings: ProxySettings, listener: socket.socket) -> None:
    """Blocks until SIGINT or SIGTERM; by then every client has its answer or an error."""
    _raise_open_file_limit(settings.max_concurrent * _SOCKETS_PER_REQUEST + 256)
    app = create_app(settings)
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_SECONDS,
        )
    )

    def stop() -> None:
        app.state.exchanges.shut_down()
        server.should_exit = True

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        await server.serve(sockets=[listener])

    asyncio.run(run())


def _raise_open_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
