# SPDX-License-Identifier: Apache-2.0
"""Sends one answer to a client, over ASGI."""

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
from vllm_ascend_pd.proxy.http.renaming import Renaming

_BREAK_OFF_SECONDS = 1.0
"""For the error event of a stream that failed. Its client may have stopped reading."""


class Reply:
    """The answer to one client. A write raises TimeoutError if the client does not read for `timeout` seconds."""

    def __init__(self, send: Send, *, request_id: str | None, timeout: float) -> None:
        self.request_id = request_id
        self.started = False
        self.finished = False
        self.status: int | None = None
        self.first_event_at: float | None = None
        """When the first bytes of a stream were sent, on `time.monotonic`'s clock."""
        self.renaming: Renaming | None = None
        """Puts the client's name of the request into the engine's answer. None: the answer stays as it is."""
        self._send = send
        self._timeout = timeout
        self._is_event_stream = False

    async def send(self, message: Message) -> None:
        """ASGI's `send`. Adds the client's request id to the headers."""
        if message["type"] == "http.response.start":
            if self.request_id is not None:
                MutableHeaders(scope=message)["X-Request-Id"] = self.request_id
            self.started, self.status = True, message["status"]
        # Set before the send: afterwards uvicorn reports a complete answer as a client that left.
        self.finished = message["type"] == "http.response.body" and not message.get("more_body", False)
        # Most writes do not wait, and a timeout for each would cost more than the write.
        steps = self._send(message).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return
        with anyio.fail_after(self._timeout):
            await _rest(steps, waits_for)

    async def start(self, answer: EngineResponse) -> None:
        """Sends the engine's status and headers, without the length of an event stream."""
        self._is_event_stream = answer.is_event_stream
        headers = client_response_headers(answer.headers)
        # A failure adds an event to a stream or ends it early. And the length of a 304 is not that of its body.
        other_length = self.renaming is not None and not self.renaming.keeps_length
        if self._is_event_stream or answer.status == HTTPStatus.NOT_MODIFIED or other_length:
            headers = [header for header in headers if header[0] != b"content-length"]
        await self.send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": headers,
            }
        )

    async def write(self, chunk: bytes) -> None:
        if self.renaming is not None:
            chunk = self.renaming.feed(chunk)
        if not chunk:
            return
        if self._is_event_stream and self.first_event_at is None:
            self.first_event_at = time.monotonic()
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        rest = b"" if self.renaming is None else self.renaming.end()
        await self.send({"type": "http.response.body", "body": rest, "more_body": False})

    async def break_off(self, error_event: bytes) -> None:
        """Ends an answer that cannot be completed. A stream gets an error event, as from vLLM. Any other body stays
        shorter than its length, so the server closes the connection and the client notices."""
        if self._is_event_stream:
            with anyio.move_on_after(_BREAK_OFF_SECONDS):
                await self.write(b"\n\n" + error_event)
                await self.finish()


@types.coroutine
def _rest(steps: Generator[Any, None, None], waits_for: Any) -> Generator[Any, None, None]:
    """Continues an `await` whose first step was made by hand and waits for `waits_for`, as `yield from` does."""
    while True:
        try:
            yield waits_for
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:  # noqa: BLE001 (mostly cancellation; passed on to the coroutine)
            step = partial(steps.throw, error)
        else:
            step = partial(next, steps)
        try:
            waits_for = step()
        except StopIteration:
            return
