# SPDX-License-Identifier: Apache-2.0
"""Limits how many client requests the proxy serves at a time, and queues the others."""

from __future__ import annotations

from collections import deque
from http import HTTPStatus

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.errors import RequestRefused

# How much of the bodies of all waiting requests is kept in memory here. The rest stays in the server's buffers, which
# stop filling, and at the clients.
_MAX_HELD_BYTES = 64 * 1024 * 1024


class RequestAdmission:
    """Lets `limit` requests through at a time and queues up to `queue_length` more, in order of arrival.

    The event loop's thread owns it.
    """

    def __init__(self, limit: int, queue_length: int, timeout: float) -> None:
        """`timeout`: seconds that a request waits before it is refused."""
        self.limit = limit
        self._queue_length = queue_length
        self._timeout = timeout
        self._slots = anyio.Semaphore(limit)
        self._held = 0
        """Bytes of waiting requests' bodies that are in memory here."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._slots.statistics().tasks_waiting

    @owned
    def enter(self) -> bool:
        """Takes a slot if one is free. Returns whether it did. `leave` gives the slot back."""
        try:
            self._slots.acquire_nowait()
        except anyio.WouldBlock:
            return False
        return True

    @owned
    def leave(self) -> None:
        """Gives a slot back, to the next request in the queue."""
        self._slots.release()

    @owned
    async def wait(self, receive: Receive) -> Receive:
        """Waits for a slot and takes it. Returns the callable to receive the request by from then on.

        Raises RequestRefused (429) if the queue is full or the timeout has passed, and ClientDisconnect if the client
        leaves.
        """
        if self.waiting >= self._queue_length:
            raise self._full(f"{self._queue_length} more wait, which is the limit")
        early = _EarlyBody(receive)
        entered = False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read_ahead, early)
                with anyio.move_on_after(self._timeout) as early.waiting:
                    await self._slots.acquire()
                    entered = True
                tasks.cancel_scope.cancel()
            if early.client_left:
                raise ClientDisconnect
            if not entered:
                raise self._full(f"{self.waiting} more wait, and this one has waited {self._timeout:g} s")
        except BaseException:
            if entered:
                self.leave()
            raise
        finally:
            self._held -= early.size
        return early.receive

    async def _read_ahead(self, early: _EarlyBody) -> None:
        """Receives messages of a waiting request: only then does the server report that its client left."""
        while not early.client_left and self._held < _MAX_HELD_BYTES:
            self._held += await early.read()

    def _full(self, queue: str) -> RequestRefused:
        return RequestRefused(
            HTTPStatus.TOO_MANY_REQUESTS, f"the proxy serves {self.limit} requests, {queue}: retry later"
        )


class _EarlyBody:
    """What a client has sent of a request that waits."""

    def __init__(self, receive: Receive) -> None:
        self.waiting = anyio.CancelScope()
        """The wait for a slot. `RequestAdmission.wait` sets it; it ends when the client leaves."""
        self.client_left = False
        self.size = 0
        """Bytes read ahead."""
        self._receive = receive
        self._messages: deque[Message] = deque()
        """Messages read ahead, oldest first."""

    async def read(self) -> int:
        """Reads one message ahead. Returns how many bytes of the body it has."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
            self.waiting.cancel()
            return 0
        self._messages.append(message)
        self.size += (size := len(message.get("body", b"")))
        return size

    async def receive(self) -> Message:
        """ASGI's receive: first what was read ahead, then what still arrives."""
        return self._messages.popleft() if self._messages else await self._receive()
