# SPDX-License-Identifier: Apache-2.0
"""Cleans text from outside before it gets into a log, an error or an answer."""

import codecs

import msgspec

MAX_NAME_CHARS = 512

NAME = msgspec.Meta(max_length=MAX_NAME_CHARS)
"""Bounds a field of a message that `is_name` checks."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that decoding text from outside raises."""


def has_mark(content: bytes | bytearray | memoryview) -> bool:
    """Returns whether text in UTF-8 begins with a byte order mark, which some editors and shells add. JSON has none."""
    return bytes(content[:3]) == codecs.BOM_UTF8


def why_unreadable(content: bytes | bytearray | memoryview, error: Exception) -> str:
    """Returns what is wrong with text from outside that raised one of `UNREADABLE`."""
    return "it begins with a byte order mark: send UTF-8 without one" if has_mark(content) else str(error)


def one_line(text: str, limit: int) -> str:
    """Returns `text` as one printable line of about `limit` characters at most."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[:limit] + "..."


def is_name(text: str) -> bool:
    """Returns whether `text` may be the name of an engine, a layer or a model: short and printable."""
    return len(text) <= MAX_NAME_CHARS and text.isprintable()
