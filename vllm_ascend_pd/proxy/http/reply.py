# SPDX-License-Identifier: Apache-2.0
"""What has been sent to one client, over ASGI."""

from __future__ import annotations

import time
import types
from collections.abc import Generator
from functools import partial
from http import HTTPStatus
from typing import Any

import anyio
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from vllm_ascend_pd.proxy.http.engine_client import EngineResponse
from vllm_ascend_pd.proxy.http.headers import client_response_headers

# For the last words on a stream that failed: its client may have stopped reading.
_BREAK_OFF_SECONDS = 1.0


class Reply:
    """A write raises TimeoutError when the client did not read for `timeout` seconds."""

    def __init__(self, send: Send, *, request_id: str | None, timeout: float) -> None:
        self.request_id = request_id
        self.started = False
        self.finished = False
        self.status: int | None = None
        self.first_event_at: float | None = None
        """When a stream's first bytes went to the client, on `time.monotonic`'s clock."""
        self._send = send
        self._timeout = timeout
        self._is_event_stream = False

    async def send(self, message: Message) -> None:
        """ASGI's send; adds the request id that the client knows."""
        if message["type"] == "http.response.start":
            if self.request_id is not None:
                MutableHeaders(scope=message)["X-Request-Id"] = self.request_id
            self.started, self.status = True, message["status"]
        # Before the send: the server takes a completed answer for a client that left.
        self.finished = message["type"] == "http.response.body" and not message.get("more_body", False)
        # Most writes wait for nothing, and a timeout for each would cost more than the write.
        steps = self._send(message).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return
        with anyio.fail_after(self._timeout):
            await _rest(steps, waits_for)

    async def start(self, answer: EngineResponse) -> None:
        """Status and headers as the engine gave them, but for the length of an event stream."""
        self._is_event_stream = answer.is_event_stream
        headers = client_response_headers(answer.headers)
        # What fails in an event stream is put in, so it may become longer, or end early. Nor has a 304 what it names.
        if self._is_event_stream or answer.status == HTTPStatus.NOT_MODIFIED:
            headers = [header for header in headers if header[0] != b"content-length"]
        await self.send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": headers,
            }
        )

    async def write(self, chunk: bytes) -> None:
        if not chunk:
            return
        if self._is_event_stream and self.first_event_at is None:
            self.first_event_at = time.monotonic()
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self, error_event: bytes) -> None:
        """Ends an answer that cannot be completed: a stream with an error event, as vLLM does. Any other body
        stays short of its announced length, so the server closes the connection and the client sees that."""
        if self._is_event_stream:
            with anyio.move_on_after(_BREAK_OFF_SECONDS):
                await self.write(b"\n\n" + error_event)
                await self.finish()


@types.coroutine
def _rest(steps: Generator[Any, None, None], waits_for: Any) -> Generator[Any, None, None]:
    """What is left of an `await` that was begun by hand and waits for `waits_for`, as `yield from` would go on."""
    while True:
        try:
            yield waits_for
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:  # noqa: BLE001 (cancelled, mostly: it is for who waits)
            step = partial(steps.throw, error)
        else:
            step = partial(next, steps)
        try:
            waits_for = step()
        except StopIteration:
            return
