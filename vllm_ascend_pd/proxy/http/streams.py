# SPDX-License-Identifier: Apache-2.0
"""Reads bodies with a limit, and notices when a client disconnects."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable

from starlette.types import Receive


class TooLarge(Exception):
    """A body exceeds its limit."""


async def read_all(chunks: AsyncIterable[bytes], limit: int) -> bytes:
    """Returns the whole body. Raises TooLarge as soon as it exceeds `limit` bytes."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise TooLarge
    return bytes(body)


async def when_disconnected(receive: Receive, action: Callable[[], None]) -> None:
    """Waits until the client closes the connection, then calls `action`. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    action()
