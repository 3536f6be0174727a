# SPDX-License-Identifier: Apache-2.0
"""How the files that may be open are shared: every connection is one."""

from __future__ import annotations

import logging
import resource
from typing import NamedTuple

log = logging.getLogger(__name__)

# A request that is served holds the client's socket, one to a decode engine and, for each of its prompts, a ticket's
# and one to a prefill engine. So half of them come from outside, and half go to engines: room for three prompts, or
# where files are few for one.
_OF_EITHER_HALF = 4
_LEAST_OF_EITHER_HALF = 2
# Connections that nobody has accepted yet, of those that come at once: at most as many (Linux's own bound), and at most
# one in so many of the files that may be open, because they become files before they are counted.
_MAX_BACKLOG = 4096
_FILES_PER_BACKLOG = 8
# Connections without a request, beside few that have one.
_MIN_IDLE = 1024
# Of our own.
_SPARE_FILES = 256


class Sockets(NamedTuple):
    """What there is room for."""

    concurrent: int
    """Requests that are served at a time."""
    waiting: int
    """Requests that wait until fewer are served: each is its client's connection."""
    idle: int
    """Connections from outside without a request."""
    connections: int
    """Connections from outside."""
    backlog: int
    """Connections that come at once."""


def share(files: int, concurrent: int, waiting: int) -> Sockets:
    """What `files` allow of what is asked for. Where they are few, those for the line are cut first, to one for each
    request that is served."""
    backlog = max(1, min(_MAX_BACKLOG, files // _FILES_PER_BACKLOG))
    left = max(0, files - backlog - _SPARE_FILES)
    served = max(1, min(concurrent, left // (2 * _LEAST_OF_EITHER_HALF + 1)))
    to_engines = served * max(_LEAST_OF_EITHER_HALF, min(_OF_EITHER_HALF, left // served // 2))
    idle = max(to_engines, min(_MIN_IDLE, left // 8))
    in_line = max(0, min(waiting, left - to_engines - idle))
    return Sockets(served, in_line, idle, idle + in_line, backlog)


def wanted_files(concurrent: int, waiting: int) -> int:
    half = concurrent * _OF_EITHER_HALF
    return half + max(half, _MIN_IDLE) + waiting + _MAX_BACKLOG + _SPARE_FILES


def take(concurrent: int, waiting: int) -> Sockets:
    """Raises the limit of open files as far as that is needed and allowed, and says what it is enough for."""
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
    """Returns how many files may be open, at most `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
