# SPDX-License-Identifier: Apache-2.0
"""Divides the process's limit of open files between kinds of connections."""

from __future__ import annotations

import logging
import resource
from typing import NamedTuple

log = logging.getLogger(__name__)

_PER_REQUEST = 4
"""Incoming sockets per request, and as many outgoing ones, for three prompts. A request has one socket to its client
and one to a decode engine. Each of its prompts adds one for the ticket and one to a prefill engine."""
_LEAST_PER_REQUEST = 2
"""The same for one prompt, where the limit is low."""
_MAX_BACKLOG = 4096
"""New connections that may wait to be accepted: Linux's own limit."""
_FILES_PER_BACKLOG = 8
"""The backlog gets at most one of so many files: its connections become files before the proxy counts them."""
_MIN_IDLE = 1024
"""Connections without a request, where few requests are served."""
_SPARE_FILES = 256
"""For everything else that the process opens."""


class Sockets(NamedTuple):
    """How many of each kind the limit allows."""

    concurrent: int
    """Requests that are served at a time."""
    waiting: int
    """Requests that wait to be served. Each holds its client's connection."""
    idle: int
    """Incoming connections without a request."""
    connections: int
    """Incoming connections."""
    backlog: int
    """New connections that wait to be accepted."""


def share(files: int, concurrent: int, waiting: int) -> Sockets:
    """Divides `files` for the wanted numbers of requests. If they are too few, fewer requests may wait, and then fewer
    are served."""
    backlog = max(1, min(_MAX_BACKLOG, files // _FILES_PER_BACKLOG))
    left = max(0, files - backlog - _SPARE_FILES)
    served = max(1, min(concurrent, left // (2 * _LEAST_PER_REQUEST + 1)))
    to_engines = served * max(_LEAST_PER_REQUEST, min(_PER_REQUEST, left // served // 2))
    idle = max(to_engines, min(_MIN_IDLE, left // 8))
    in_line = max(0, min(waiting, left - to_engines - idle))
    return Sockets(served, in_line, idle, idle + in_line, backlog)


def wanted_files(concurrent: int, waiting: int) -> int:
    half = concurrent * _PER_REQUEST
    return half + max(half, _MIN_IDLE) + waiting + _MAX_BACKLOG + _SPARE_FILES


def reserve_sockets(concurrent: int, waiting: int) -> Sockets:
    """Raises the limit of open files as far as needed and allowed, and divides it."""
    files = _raise_limit(wanted_files(concurrent, waiting))
    sockets = share(files, concurrent, waiting)
    log.info(
        "with %d open files %d requests are served at a time, %d others wait, and %d connections may be idle",
        files,
        sockets.concurrent,
        sockets.waiting,
        sockets.idle,
    )
    if sockets.concurrent < concurrent or sockets.waiting < waiting:
        log.warning(
            "the hard limit of open files (ulimit -Hn) does not allow --max-concurrent %d and --max-waiting %d",
            concurrent,
            waiting,
        )
    return sockets


def _raise_limit(wanted: int) -> int:
    """Returns the new limit of open files, at most `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
