# SPDX-License-Identifier: Apache-2.0
"""Reading what others send, and noticing when they leave."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable

from starlette.types import Receive


class TooLarge(Exception):
    """A body is longer than its limit."""


async def read_all(chunks: AsyncIterable[bytes], limit: int) -> bytes:
    """The whole body. Raises TooLarge as soon as it exceeds `limit` bytes."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise TooLarge
    return bytes(body)


async def when_disconnected(receive: Receive, action: Callable[[], None]) -> None:
    """Waits, once a request's body has been read, until its sender closes the connection; then acts."""
    while (await receive())["type"] != "http.disconnect":
        pass
    action()
