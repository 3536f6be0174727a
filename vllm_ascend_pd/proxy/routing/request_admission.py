# SPDX-License-Identifier: Apache-2.0
"""Limits how many client requests the proxy serves at a time, and queues the others."""

from __future__ import annotations

from http import HTTPStatus

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.errors import RequestRefused, body_too_large

_MAX_HELD_BYTES = 1024 * 1024 * 1024
"""The bodies of all waiting requests together. Each is read to its end: the server reports that a client has left only
to who has read all that the client sent. A body that is not read stays in the server's buffers, of 64 KiB and more for
each, so a lower limit would save little."""


class RequestAdmission:
    """Lets `limit` requests through at a time and queues up to `queue_length` more, in order of arrival.

    The event loop's thread owns it.
    """

    def __init__(self, limit: int, queue_length: int, timeout: float, max_body_bytes: int) -> None:
        """`timeout`: seconds that a request waits before it is refused. `max_body_bytes`: of one request."""
        self.limit = limit
        self._queue_length = queue_length
        self._timeout = timeout
        self._max_body_bytes = max_body_bytes
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

        Raises RequestRefused (429) if the queue is full, in number or in bytes, or the timeout has passed;
        RequestRefused (413) if the body is too large; and ClientDisconnect if the client leaves.
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
            if early.ended is not None:
                raise early.ended
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
        """Receives a waiting request's body, and then the news that its client left."""
        while early.ended is None:
            self._held += await early.read()
            if early.size > self._max_body_bytes:
                early.end(body_too_large(self._max_body_bytes))
            elif self._held > _MAX_HELD_BYTES:
                bodies = f"the bodies of {self.waiting} that wait take {_MAX_HELD_BYTES >> 20} MiB"
                early.end(self._full(f"{bodies}, which is the limit"))

    def _full(self, queue: str) -> RequestRefused:
        return RequestRefused(
            HTTPStatus.TOO_MANY_REQUESTS, f"the proxy serves {self.limit} requests, {queue}: retry later"
        )


class _EarlyBody:
    """What a client has sent of a request that waits."""

    def __init__(self, receive: Receive) -> None:
        self.waiting = anyio.CancelScope()
        """The wait for a slot. `RequestAdmission.wait` sets it; `end` cancels it."""
        self.ended: Exception | None = None
        """Why the request waits no more."""
        self._receive = receive
        self._body = bytearray()
        self._more_body = True
        """Whether a part of the body is still to come."""
        self._is_taken = False
        """Whether `receive` has returned the part that was read ahead."""

    @property
    def size(self) -> int:
        """Bytes read ahead."""
        return len(self._body)

    def end(self, reason: Exception) -> None:
        """Ends the wait."""
        self.ended = reason
        self.waiting.cancel()

    async def read(self) -> int:
        """Reads one message ahead. Returns how many bytes of the body it has."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.end(ClientDisconnect())
            return 0
        self._body += (part := message.get("body", b""))
        self._more_body = message.get("more_body", False)
        return len(part)

    async def receive(self) -> Message:
        """ASGI's receive: first what was read ahead, then what still arrives."""
        if self._is_taken:
            return await self._receive()
        self._is_taken = True
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self._more_body}
