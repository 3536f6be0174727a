# SPDX-License-Identifier: Apache-2.0
"""Cleans text from outside before it gets into a log, an error or an answer."""

import msgspec

MAX_NAME_CHARS = 512

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that decoding text from outside raises."""


def one_line(text: str, limit: int) -> str:
    """Returns `text` as one printable line of about `limit` characters at most."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[:limit] + "..."


def is_name(text: str) -> bool:
    """Returns whether `text` may be the name of an engine, a layer or a model: short and printable."""
    return len(text) <= MAX_NAME_CHARS and text.isprintable()
