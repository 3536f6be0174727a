# SPDX-License-Identifier: Apache-2.0
"""Text from outside, before it gets into a log, an error or an answer."""

import msgspec

MAX_NAME_CHARS = 512

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding text from outside raises."""


def one_line(text: str, limit: int) -> str:
    """`text` as one printable line of at most about `limit` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[:limit] + "..."


def is_name(text: str) -> bool:
    """Whether `text` may be somebody's name: an engine's, a layer's, a model's."""
    return len(text) <= MAX_NAME_CHARS and text.isprintable()
