# SPDX-License-Identifier: Apache-2.0
"""An engine's answer on its way to the client: reads vLLM's events, puts the client's name of the request in, and
writes."""

from __future__ import annotations

import enum
import re
import time
from http import HTTPStatus
from typing import Any, NamedTuple

import anyio
import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.proxy.http.engine_client import EngineResponse
from vllm_ascend_pd.proxy.http.messages import client_response_headers

_END = b"\n\n"
_LAST = b"[DONE]"
ERROR_KEY = b'"error"'
"""Quotes inside a JSON string are escaped, so no token contains this."""
_NO_REASON = "Internal server error"
_MISREAD_ERROR = re.compile(r"[0-9]+ validation errors? for ChatCompletionStreamResponse\b")
"""The message of /v1/messages if the chat below it fails: it parses the error as a part of the answer."""
_OPENING_TYPES = ("response.created", "response.in_progress", "message_start", "ping")
"""Events that come before any token on other routes than completions."""


class Opening(enum.Enum):
    """The result of reading a stream's first events."""

    NOTHING = "nothing yet"
    CONTENT = "content"
    FAILED = "failed"


class Events:
    """Cuts a stream's bytes into whole events. More than `limit` bytes without an event's end pass as they are."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Returns the events that are complete now, concatenated. Empty if there are none."""
        pending = self._rest + chunk
        end = pending.rfind(_END)
        if end >= 0:
            end += len(_END)
        else:
            end = len(pending) if len(pending) > self._limit else 0
        self._rest = pending[end:]
        return pending[:end]

    def rest(self) -> bytes:
        """Returns the bytes after the last whole event, at the stream's end."""
        rest, self._rest = self._rest, b""
        return rest


def opening(events: bytes) -> Opening:
    """Whether `events` contain a token or an error of the engine. vLLM's first event may have neither: a chat's only
    names the role."""
    for event in events.split(_END):
        data = _data(event)
        if data is None:
            continue
        if (status := _status(data)) >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS:
            return Opening.FAILED
        if not _is_empty(data):
            return Opening.CONTENT
    return Opening.NOTHING


def split_errors(events: bytes) -> list[tuple[bytes, int]]:
    """Splits events into pairs, in order: (other events, 0) and (one error event, its status)."""
    if ERROR_KEY not in events:
        return [(events, 0)]
    whole = events.split(_END)
    parts = [each + _END for each in whole[:-1]] + [each for each in whole[-1:] if each]
    return [(part, _status(data) if (data := _data(part)) is not None else 0) for part in parts]


def error_of(events: bytes) -> tuple[int, bytes]:
    """Status and JSON body of the first error event. Raises ValueError if there is none."""
    for event in events.split(_END):
        data = _data(event)
        if data is not None and (status := _status(data)):
            return status, msgspec.json.encode(data)
    raise ValueError("no error event")


def names_no_reason(body: bytes) -> bool:
    """Whether an error is the general one that vLLM sends for any internal failure."""
    try:
        answer = msgspec.json.decode(body)
    except UNREADABLE:
        return False
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return isinstance(message, str) and (message == _NO_REASON or _MISREAD_ERROR.match(message) is not None)


def _data(event: bytes) -> Any | None:
    """An event's JSON; None for a comment, an empty event, or the one that ends vLLM's streams; "not JSON" for other
    bytes."""
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return None
    data = lines[0].removeprefix(b"data:").strip()
    if data == _LAST:
        return None
    try:
        return msgspec.json.decode(data)
    except UNREADABLE:
        return "not JSON"


def _status(data: Any) -> int:
    """The code of `{"error": {...}}`; 500 if it has none; 0 if `data` is not an error."""
    error = data.get("error") if isinstance(data, dict) else None
    if error is None:
        return 0
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _is_empty(data: Any) -> bool:
    """Whether a part of an answer has neither a token nor a finish reason."""
    if isinstance(data, dict) and data.get("type") in _OPENING_TYPES:
        return True
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list):
        return False
    return all(isinstance(choice, dict) and not _says(choice) for choice in choices)


def _says(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        delta = any(value for name, value in delta.items() if name != "role")
    return any((delta, choice.get("text"), choice.get("token_ids"), choice.get("finish_reason")))


_MAX_NAME_BYTES = 256
"""Of a client's name. Every event of a stream repeats it."""
NAMED_WITHIN_BYTES = 256
"""vLLM's answers begin with their id."""


class Renaming(NamedTuple):
    """Replaces the engine's id of a request by the client's in an answer.

    Engines and tickets need an id that is unique and hard to guess, and the client's may be neither. A single engine
    names an answer after the client's `X-Request-Id`, so this does, too.
    """

    old: bytes
    new: bytes

    @classmethod
    def to(cls, given: str, engine_id: str) -> Renaming | None:
        """Returns a renaming to the client's `given`. None if that is the engine's id, or too long to repeat."""
        name = msgspec.json.encode(given)[1:-1]
        return None if given == engine_id or len(name) > _MAX_NAME_BYTES else cls(engine_id.encode(), name)


_BREAK_OFF_SECONDS = 1.0
"""For the error event of a stream that failed. Its client may have stopped reading."""


class Reply:
    """The answer to one client. If the client does not read, the kernel ends its connection (`server.py`), and a write
    that waits returns."""

    def __init__(self, send: Send, *, request_id: str | None) -> None:
        self.request_id = request_id
        self.started = False
        self.finished = False
        self.status: int | None = None
        self.first_event_at: float | None = None
        """When the first bytes of a stream were sent, on `time.monotonic`'s clock."""
        self.renaming: Renaming | None = None
        """Puts the client's name of the request into the engine's answer. None: the answer stays as it is."""
        self._send = send
        self._is_event_stream = False

    async def send(self, message: Message) -> None:
        """ASGI's `send`. Adds the client's request id to the headers."""
        if message["type"] == "http.response.start":
            if self.request_id is not None:
                MutableHeaders(scope=message)["X-Request-Id"] = self.request_id
            self.started, self.status = True, message["status"]
        # Set before the send: afterwards uvicorn reports a complete answer as a client that left.
        self.finished = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def start(self, answer: EngineResponse) -> None:
        """Sends the engine's status and headers, without the length of an event stream."""
        self._is_event_stream = answer.is_event_stream
        headers = client_response_headers(answer.headers)
        # A failure adds an event to a stream or ends it early.
        other_length = self.renaming is not None and len(self.renaming.new) != len(self.renaming.old)
        if self._is_event_stream or other_length:
            headers = [header for header in headers if header[0] != b"content-length"]
        await self.send(
            {
                "type": "http.response.start",
                "status": answer.status,
                "headers": headers,
            }
        )

    async def write(self, chunk: bytes) -> None:
        """`chunk`: whole events of a stream. Of other bodies the first one has `NAMED_WITHIN_BYTES`."""
        if not chunk:
            return
        if self.renaming is not None:
            chunk = chunk.replace(*self.renaming)
        if self._is_event_stream and self.first_event_at is None:
            self.first_event_at = time.monotonic()
        await self.send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self, error_event: bytes) -> None:
        """Ends an answer that cannot be completed. A stream gets an error event, as from vLLM. Any other body stays
        shorter than its length, so the server closes the connection and the client notices."""
        if self._is_event_stream:
            with anyio.move_on_after(_BREAK_OFF_SECONDS):
                await self.write(b"\n\n" + error_event)
                await self.finish()
