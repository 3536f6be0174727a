# SPDX-License-Identifier: Apache-2.0
"""Serves the proxy's port until SIGINT or SIGTERM: uvicorn as it is, with its own limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import uvicorn
import uvloop

from vllm_ascend_pd.proxy.app import ProxyApp
from vllm_ascend_pd.proxy.settings import ProxySettings

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
"""For everything else that the process opens."""

_LONGEST_USER_TIMEOUT_MS = (1 << 31) - 1
"""Of TCP_USER_TIMEOUT (tcp(7))."""


class Capacity(NamedTuple):
    """What the process's limit of open files allows."""

    concurrent: int
    """Requests that are served at a time."""
    waiting: int
    """Requests that wait to be served. Each holds its client's connection."""
    connections: int
    """Incoming connections. uvicorn answers requests on further ones with 503."""
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
    in_line = max(0, min(waiting, left - served))
    connections = max(_PER_REQUEST, int(share * incoming)) + in_line
    return Capacity(max(1, int(share * concurrent)), in_line, connections, backlog)


def reserve_files(concurrent: int, waiting: int) -> Capacity:
    """Raises the limit of open files to the hard limit, and divides it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = capacity(sys.maxsize if hard == resource.RLIM_INFINITY else hard, concurrent, waiting)
    if (found.concurrent, found.waiting) != (concurrent, waiting):
        log.warning(
            "the hard limit of %d open files (ulimit -Hn) does not allow --max-concurrent %d and --max-waiting %d: "
            "%d requests are served at a time, and %d others wait",
            *(hard, concurrent, waiting, found.concurrent, found.waiting),
        )
    return found


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
    if settings.metaserver_token_file is None:
        log.warning(
            "any client that reaches this port may post tickets for its own requests: --metaserver-token-file "
            "prevents that"
        )
    server = _Server(
        uvicorn.Config(
            app.asgi,
            lifespan="on",
            http="httptools",
            ws="none",
            backlog=found.backlog,
            limit_concurrency=found.connections + 1,
            timeout_keep_alive=math.ceil(settings.keep_alive_timeout),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_SECONDS,
        )
    )

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        ends = [asyncio.create_task(event.wait()) for event in (stopped, app.ended)]
        await asyncio.wait([running, *ends], return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            log.error("the proxy stops: it could not start, or one of its background tasks failed")
        app.shut_down()
        server.should_exit = True
        [error] = await asyncio.gather(running, return_exceptions=True)
        if error is not None:
            log.error("the proxy's server failed", exc_info=error)
        return stopped.is_set() and error is None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # it cancels the tasks that are left
        return runner.run(run())
