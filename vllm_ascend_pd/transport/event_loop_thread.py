# SPDX-License-Identifier: Apache-2.0
"""An asyncio event loop on a thread of its own."""

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from vllm_ascend_pd.transport.names import HostNames

logger = logging.getLogger(__name__)


class _Loop(asyncio.SelectorEventLoop):
    """Looks host names up by `HostNames`. httpx has no other way to say how."""

    def __init__(self) -> None:
        super().__init__()
        self._host_names = HostNames()

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """For connections. What a server asks, with flags, is looked up as usual."""
        if not host or family or flags:
            return await super().getaddrinfo(host, port, family=family, type=type, proto=proto, flags=flags)
        addresses = await self._host_names.addresses(host if isinstance(host, str) else host.decode("ascii"))
        return [
            (socket.AF_INET6, type, proto, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, type, proto, "", (address, port))
            for address in addresses
        ]


class EventLoopThread:
    """Any thread may call the methods. Tasks run on the loop's own thread."""

    def __init__(self, name: str, closing: Callable[[], Awaitable[None]]) -> None:
        """Starts the thread. `closing`: runs there at the end, when no task is left."""
        self.loop = _Loop()
        self._closing = closing
        self._lock = threading.Lock()
        self._closed = False  # under the lock: nothing gets to the loop once it is set
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps no reference to its tasks
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> Future[None] | None:
        """Starts a task soon. Cancelling what it returns cancels the task. After `close` it does nothing."""
        with self._lock:
            if self._closed:
                return None
            return asyncio.run_coroutine_threadsafe(self._run_task(work, *args), self.loop)

    async def _run_task(self, work: Callable[..., Coroutine[None, None, None]], *args: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await work(*args)
        except Exception:
            logger.exception("a task of thread %s failed", self._thread.name)
        finally:
            self._tasks.discard(task)

    def close(self, timeout_s: float) -> bool:
        """Cancels all tasks and ends the thread. Returns False if that takes longer."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._run_until_stopped())
        finally:
            self.loop.close()

    async def _run_until_stopped(self) -> None:
        await self._stop.wait()
        tasks = tuple(self._tasks)  # what they started ends with them
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._closing()
        await self.loop.shutdown_asyncgens()
