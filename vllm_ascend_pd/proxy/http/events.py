# SPDX-License-Identifier: Apache-2.0
"""vLLM's event streams as far as the proxy reads them: is there a token yet, and is this an error?"""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from vllm_ascend_pd.core.text import UNREADABLE

_END = b"\n\n"
# Text between quotes has its own quotes escaped, so tokens do not contain this.
_ERROR_KEY = b'"error"'
_NO_REASON = "Internal server error"
# What /v1/messages says of a chat's error, which it takes for a piece of the answer.
_MISREAD_ERROR = re.compile(r"[0-9]+ validation errors? for ChatCompletionStreamResponse\b")
# Of other streams than completions: events that come before any token.
_OPENING_TYPES = ("response.created", "response.in_progress", "message_start", "ping")


class Opening(enum.Enum):
    """What a stream's first events say."""

    NOTHING = "nothing yet"
    CONTENT = "content"
    FAILED = "failed"


class Events:
    """Cuts bytes as they come into whole events, of at most `limit` bytes: what is longer passes uncut."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Whole events, one after the other, or nothing."""
        pending = self._rest + chunk
        end = pending.rfind(_END)
        if end >= 0:
            end += len(_END)
        else:
            end = len(pending) if len(pending) > self._limit else 0
        self._rest = pending[end:]
        return pending[:end]

    def rest(self) -> bytes:
        """What the stream ended in."""
        rest, self._rest = self._rest, b""
        return rest


def opening(events: bytes) -> Opening:
    """vLLM's first event may have no token: a chat's names the role."""
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
    """(events, 0) and (one error event, its status), in order."""
    if _ERROR_KEY not in events:
        return [(events, 0)]
    whole = events.split(_END)
    parts = [each + _END for each in whole[:-1]] + [each for each in whole[-1:] if each]
    return [(part, _status(data) if (data := _data(part)) is not None else 0) for part in parts]


def error_of(events: bytes) -> tuple[int, bytes]:
    """Status and body, as JSON, of the first error event."""
    for event in events.split(_END):
        data = _data(event)
        if data is not None and (status := _status(data)):
            return status, msgspec.json.encode(data)
    raise ValueError("no error event")


def names_no_reason(body: bytes) -> bool:
    """Whether an error is what vLLM says of any request that failed inside."""
    try:
        answer = msgspec.json.decode(body)
    except UNREADABLE:
        return False
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return isinstance(message, str) and (message == _NO_REASON or _MISREAD_ERROR.match(message) is not None)


def _data(event: bytes) -> Any | None:
    """An event's JSON; None for a comment or an empty one, a string for what is not JSON."""
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return None
    try:
        return msgspec.json.decode(lines[0].removeprefix(b"data:"))
    except UNREADABLE:
        return "not JSON"


def _status(data: Any) -> int:
    """The code of `{"error": {...}}`; 500 where it has none, 0 for what is no error."""
    error = data.get("error") if isinstance(data, dict) else None
    if error is None:
        return 0
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _is_empty(data: Any) -> bool:
    """Whether a piece of an answer has neither a token nor an end."""
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
