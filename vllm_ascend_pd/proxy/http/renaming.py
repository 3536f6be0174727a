# SPDX-License-Identifier: Apache-2.0
"""Puts the client's name of a request into an engine's answer, in place of the id that the engine got from the proxy.

Engines and tickets need an id that is unique and hard to guess, and the client's may be neither. A single engine names
an answer after the client's `X-Request-Id`, so this does, too.
"""

from __future__ import annotations

import re

import msgspec

_MAX_NAME_BYTES = 256
"""Of a client's name. Every event of a stream repeats it."""
_IN_ID = frozenset(bytes([each]) for each in b"0123456789abcdef-")
_PART_OF_ID = re.compile(rb"[0-9a-f-]{1,35}\Z")
"""What may be the beginning of an id, at the end of a chunk."""


class Renaming:
    """Replaces one id in the chunks of a body, also where two chunks share it."""

    def __init__(self, engine_id: str, name: bytes) -> None:
        """`engine_id`: a UUID. `name`: as it is written within a JSON string."""
        self._old = engine_id.encode()
        self._new = name
        self._rest = b""
        """The end of the last chunk, if an id may begin there."""

    @classmethod
    def to(cls, given: str, engine_id: str) -> Renaming | None:
        """Returns a renaming to the client's `given`. None if that is the engine's id, or too long to repeat."""
        name = msgspec.json.encode(given)[1:-1]
        return None if given == engine_id or len(name) > _MAX_NAME_BYTES else cls(engine_id, name)

    @property
    def keeps_length(self) -> bool:
        return len(self._new) == len(self._old)

    def feed(self, chunk: bytes) -> bytes:
        """Returns what is complete now."""
        body, self._rest = self._rest + chunk, b""
        if body[-1:] not in _IN_ID:  # the usual end of an event or a body
            return body.replace(self._old, self._new)
        last = body.rfind(self._old)
        behind = 0 if last < 0 else last + len(self._old)
        found = _PART_OF_ID.search(body, max(behind, len(body) - len(self._old) + 1))
        cut = len(body)
        if found is not None:
            starts = (at for at in range(found.start(), cut) if self._old.startswith(body[at:]))
            cut = next(starts, cut)
        self._rest = body[cut:]
        return body[:cut].replace(self._old, self._new)

    def end(self) -> bytes:
        """Returns what was held back."""
        rest, self._rest = self._rest, b""
        return rest
