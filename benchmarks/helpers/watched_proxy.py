# SPDX-License-Identifier: Apache-2.0
"""The proxy, with a heartbeat in its event loop: what `proxy_stalls.py` measures.

$ python benchmarks/helpers/watched_proxy.py FILE OPTION...

FILE holds a double, the longest stop so far in seconds: CPU time of the process between two beats. Whoever reads it may
set it to 0. Lookups of names in `hangs.invalid` get no answer, as from a name server that is gone.
"""

import asyncio
import mmap
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from vllm_ascend_pd.cli import main

BEAT_SECONDS = 0.002
NO_ANSWER = "hangs.invalid"
HANGS_SECONDS = 30.0
STOP = struct.Struct("d")


class WatchedLoop(uvloop.Loop):
    async def getaddrinfo(self, host: Any, port: Any, **hints: Any) -> Any:
        if _gets_no_answer(host):
            await self.run_in_executor(None, time.sleep, HANGS_SECONDS)
        return await super().getaddrinfo(host, port, **hints)


def _gets_no_answer(host: Any) -> bool:
    return (host if isinstance(host, str) else (host or b"").decode()).endswith(NO_ANSWER)


def _hanging(lookup: Callable[..., Any]) -> Callable[..., Any]:
    def getaddrinfo(host: Any, *args: Any, **hints: Any) -> Any:
        if _gets_no_answer(host):
            time.sleep(HANGS_SECONDS)
        return lookup(host, *args, **hints)

    return getaddrinfo


def watched_loop(shared: mmap.mmap) -> asyncio.AbstractEventLoop:
    loop = WatchedLoop()
    last = time.process_time()

    def beat() -> None:
        nonlocal last
        stop = time.process_time() - last
        if stop > STOP.unpack_from(shared)[0]:
            STOP.pack_into(shared, 0, stop)
        loop.call_later(BEAT_SECONDS, beat)
        last = time.process_time()

    loop.call_soon(beat)
    return loop


if __name__ == "__main__":
    with Path(sys.argv[1]).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), STOP.size)
    socket.getaddrinfo = _hanging(socket.getaddrinfo)
    uvloop.new_event_loop = lambda: watched_loop(shared)  # type: ignore[assignment, return-value]
    sys.argv[1:2] = ["proxy"]
    main()
