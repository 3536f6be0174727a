# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's event streams: whether a token has come, and which events are errors."""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE

_END = b"\n\n"
_ERROR_KEY = b'"error"'
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
    """Whether `events` contain a token or an error. vLLM's first event may have neither: a chat's only names the
    role."""
    for event in events.split(_END):
        data = _data(event)
        if data is None:
            continue
        if _status(data) >= 500:
            return Opening.FAILED
        if not _is_empty(data):
            return Opening.CONTENT
    return Opening.NOTHING


def split_errors(events: bytes) -> list[tuple[bytes, int]]:
    """Splits events into pairs, in order: (other events, 0) and (one error event, its status)."""
    if _ERROR_KEY not in events:
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
    """An event's JSON; None for a comment or an empty event; "not JSON" for other bytes."""
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return None
    try:
        return msgspec.json.decode(lines[0].removeprefix(b"data:"))
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
