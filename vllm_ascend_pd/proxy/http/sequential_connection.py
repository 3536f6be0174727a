# SPDX-License-Identifier: Apache-2.0
"""A client's connection: uvicorn's, with what it lacks for clients that pipeline requests or speak HTTP/1.0."""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_MAX_AHEAD_BYTES = 1024 * 1024
"""Of the next request, while one is answered. A client may send it as soon as it has all bytes of the answer, which is
a moment before the server knows that it has sent them."""


class _Pipelined(Exception):
    """A client sends a request before it has the answer to the last one."""


class SequentialConnection(HttpToolsProtocol):
    """Serves one request at a time.

    uvicorn stops reading from a client that has sent its next request, and does not notice then that the client leaves.
    This goes on reading. It keeps a little of the next request, and drops what a client pipelines beyond: then the
    connection closes after the answer, and the client sends those requests again (RFC 9112, section 9.3.2).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ahead = b""
        """Bytes of the next request."""
        self._is_last = False
        """Whether the connection closes after the running request. What arrives is dropped."""

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        if not self._is_busy or self.cycle.more_body:
            super().data_received(data)
        elif len(self._ahead) + len(data) <= _MAX_AHEAD_BYTES:
            self._ahead += data
        else:
            self._end_after_this()

    def on_message_begin(self) -> None:
        if self._is_busy:
            self._end_after_this()
            raise _Pipelined  # the parser stops
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _until_closed(self.cycle)  # type: ignore[method-assign, assignment]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._ahead and not self.transport.is_closing():
            ahead, self._ahead = self._ahead, b""
            self.data_received(ahead)

    def send_400_response(self, msg: str) -> None:
        if not self._is_last:
            super().send_400_response(msg)

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_after_this(self) -> None:
        self._is_last, self._ahead = True, b""
        self.cycle.keep_alive = False


def _until_closed(cycle: RequestResponseCycle) -> Send:
    """Returns a `send` for answers without a length that ends them with the connection, as HTTP/1.0 does. uvicorn would
    cut them into chunks, which HTTP/1.0 does not know."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_unframed(message: Message) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)  # type: ignore[arg-type]

    return send_unframed
