# SPDX-License-Identifier: Apache-2.0
"""How many requests the proxy serves at a time, and the line of those that wait until it serves fewer."""

from __future__ import annotations

from collections import deque
from http import HTTPStatus

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from vllm_ascend_pd.proxy.http.errors import RequestRefused

# Of the bodies of all that wait, what is kept here. The rest stays in the server's buffers, which it stops to fill, and
# at the clients.
_MAX_HELD_BYTES = 64 * 1024 * 1024


class RequestAdmission:
    """At most `limit` requests at a time. At most `line` others wait, in their order, for `patience` seconds."""

    def __init__(self, limit: int, line: int, patience: float) -> None:
        self.limit = limit
        self._line = line
        self._patience = patience
        self._places = anyio.Semaphore(limit)
        self._held = 0

    @property
    def waiting(self) -> int:
        return self._places.statistics().tasks_waiting

    def enter(self) -> bool:
        """Takes a place. False: there is none."""
        try:
            self._places.acquire_nowait()
        except anyio.WouldBlock:
            return False
        return True

    def leave(self) -> None:
        """Gives a place to the next in line."""
        self._places.release()

    async def wait(self, receive: Receive) -> Receive:
        """Takes a place as soon as there is one; returns what to receive the request by. Raises RequestRefused (429),
        and ClientDisconnect when the client leaves."""
        if self.waiting >= self._line:
            raise self._full(f"and {self._line} wait, which is the most")
        early = _Early(receive)
        entered = False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, early)
                with anyio.move_on_after(self._patience) as early.scope:
                    await self._places.acquire()
                    entered = True
                tasks.cancel_scope.cancel()
            if early.client_left:
                raise ClientDisconnect
            if not entered:
                raise self._full(f"{self.waiting} wait, and this one has waited for {self._patience:g} s")
        except BaseException:
            if entered:
                self.leave()
            raise
        finally:
            self._held -= early.size
        return early.receive

    async def _read(self, early: _Early) -> None:
        """Reads ahead: only a client that is read from is seen to leave."""
        while not early.client_left and self._held < _MAX_HELD_BYTES:
            self._held += await early.read()

    def _full(self, line: str) -> RequestRefused:
        return RequestRefused(
            HTTPStatus.TOO_MANY_REQUESTS, f"the proxy serves {self.limit} requests, {line}: retry later"
        )


class _Early:
    """What a client has sent of a request that waits."""

    def __init__(self, receive: Receive) -> None:
        self.scope = anyio.CancelScope()
        """Of the wait."""
        self.client_left = False
        self.size = 0
        self._receive = receive
        self._messages: deque[Message] = deque()

    async def read(self) -> int:
        """Bytes that have come."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
            self.scope.cancel()
            return 0
        self._messages.append(message)
        self.size += (size := len(message.get("body", b"")))
        return size

    async def receive(self) -> Message:
        return self._messages.popleft() if self._messages else await self._receive()
