# SPDX-License-Identifier: Apache-2.0
"""ZMTP 3, ZMQ's protocol on a TCP connection, cut into its parts: without CURVE, messages can be told apart."""

from typing import NamedTuple

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class Part(NamedTuple):
    """A part of a connection: a piece of the greeting, a command, or a message with all its frames."""

    raw: bytes
    payload: bytes | None
    """A message's last frame; None for what is no message."""


class Stream:
    """One direction of a connection."""

    def __init__(self) -> None:
        self._buffer = b""
        self._greeting_left = _GREETING_BYTES

    def feed(self, data: bytes) -> list[Part]:
        """The parts that `data` completes."""
        self._buffer += data
        parts = []
        if self._greeting_left and self._buffer:  # in pieces, between which each side waits for the other's
            greeting = self._take(min(self._greeting_left, len(self._buffer)))
            self._greeting_left -= len(greeting)
            parts.append(Part(greeting, None))
        while (found := self._part()) is not None:
            size, payload = found
            parts.append(Part(self._take(size), payload))
        return parts

    def _take(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _part(self) -> tuple[int, bytes | None] | None:
        """Returns bytes of the next part and its payload, or None if it is incomplete."""
        start = 0
        while True:
            if len(self._buffer) < start + 2:
                return None
            flags = self._buffer[start]
            header = 9 if flags & _LONG else 2
            if len(self._buffer) < start + header:
                return None
            size = int.from_bytes(self._buffer[start + 1 : start + header], "big")
            body, start = start + header, start + header + size
            if len(self._buffer) < start:
                return None
            if flags & _COMMAND:
                return start, None
            if not flags & _MORE:
                return start, self._buffer[body:start]


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
"""Of a peer without keys."""


def ready(kind: str, identity: bytes = b"") -> bytes:
    """Returns the command that ends the handshake of a peer without keys. `kind`: of its socket."""
    fields = ((b"Socket-Type", kind.encode()), (b"Identity", identity))
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value for name, value in fields
    )
    return bytes([_COMMAND, len(body)]) + body
