# SPDX-License-Identifier: Apache-2.0
"""How requests and their bodies arrive: a few at a time, with bounds on a body's time, on the memory of all bodies, and
on what makes JSON slow to read.

All work is done in small parts, so that neither a burst of requests nor a large body stops the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from http import HTTPStatus

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.threads import owned
from vllm_ascend_pd.proxy.http.messages import RequestRefused, error_response

_BODY_SECONDS = 20.0
"""For a request's body to arrive."""
_BYTES_PER_SECOND = 64 * 1024
"""Each so many bytes of the body extend its time by a second, but never beyond `_BODY_SECONDS` from then on."""
_LINGER_SECONDS = 2.0
"""For the rest of a body whose request was answered without it: the answer is lost if the connection closes while the
client still sends."""
_NO_PATH = "Not Found: the path has unprintable characters"
_NO_UPGRADE = "this server speaks HTTP/1.1 alone: send no Upgrade header (JDK's HttpClient: version(HTTP_1_1))"

MAX_FIELDS = 256
"""In a request. vLLM's largest has about 90."""
MAX_MARKS = 3 * 1024 * 1024
"""Punctuation and spaces outside strings, quotes and backslashes. A token id has two, as Python writes lists. msgspec
skips so many in 35 ms at worst, and 64 MiB of plain text in 30 ms."""
_SLICE_BYTES = 64 * 1024
"""Read at a time, in 10 ms at worst and 20 us for text. Other requests have their turn in between."""

_BEGIN_PER_TURN = 4
"""Requests that begin in one turn of the event loop. Each takes 1 to 3 ms of it."""
LARGE_BODY_BYTES = 1024 * 1024
"""Of larger bodies, one is decoded in a turn."""
_FOR_TICKETS = 4
"""Of the memory for bodies, one part in so many is for engines' posts alone: requests cannot end without their
tickets."""


class Turns:
    """Lets work begin in order, a little in each turn of the event loop. The event loop's thread owns it."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        """How many may begin in a turn, and in this one."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False
        """Whether `_next` runs in the next turn."""

    @owned
    async def wait(self) -> None:
        """Returns when the caller may begin."""
        if not self._left or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
            return
        self._left -= 1
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._left = self._per_turn
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._left -= 1
        self._is_scheduled = self._left < self._per_turn
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._next)


class BodyBudget:
    """Bounds the bytes of all bodies that the proxy holds.

    A body may be as large as the room that is left beside it. So small requests find room where large ones fill it. A
    body that does not fit takes the room of larger ones that are still arriving, but a client's takes none of an
    engine's post. The event loop's thread owns it.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes."""
        self.limit = limit
        self.used = 0
        """Bytes in all bodies."""
        self._arriving: dict[HeldBody, None] = {}
        """Bodies that are incomplete, and may be ended for others."""

    @contextlib.contextmanager
    def hold(self, for_tickets: bool = False) -> Iterator[HeldBody]:
        """One body, from its first byte to the end of the `with` block. `for_tickets`: it is an engine's post."""
        held = HeldBody(self.limit if for_tickets else self.limit - self.limit // _FOR_TICKETS)
        try:
            yield held
        finally:
            self._arriving.pop(held, None)
            self.used -= held.size

    @owned
    def add(self, held: HeldBody, size: int) -> None:
        """Adds `size` bytes to a body. Raises RequestRefused (503) if there is no room."""
        while held.size + size > held.limit - self.used - size:
            may_end = (each for each in self._arriving if each.limit <= held.limit)
            largest = max(may_end, key=lambda each: each.size, default=held)
            if largest.size <= held.size:
                raise self.full()
            self._end(largest)
        held.size += size
        self.used += size

    @owned
    def arriving(self, held: HeldBody, end: Callable[[], None] | None) -> None:
        """`end`: ends the body, if others need its room. None: it is complete, and stays."""
        if end is None:
            self._arriving.pop(held, None)
        else:
            self._arriving[held] = None
            held.end = end

    def full(self) -> RequestRefused:
        return RequestRefused(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"the request body does not fit beside those of other requests (--max-bodies-mib {self.limit >> 20}): "
            "retry later",
        )

    def _end(self, held: HeldBody) -> None:
        del self._arriving[held]
        self.used -= held.size
        held.size = 0
        held.end()


class HeldBody:
    """One body's share of a `BodyBudget`, which alone changes it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes of all bodies with which this one may still grow."""
        self.size = 0
        """Bytes."""
        self.end: Callable[[], None] = lambda: None
        """Ends it, while it arrives."""


_PLAIN = bytes({*b"0123456789+-.", *range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)})
"""Bytes of numbers and names: reading them takes as little as reading text."""
_ALIKE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes({*range(256)} - {*b"[]{},"})
_OPENS, _CLOSES = b"[]"


class Structure:
    """Counts what makes a JSON body slow to read, without reading it: its fields, and its marks (`MAX_MARKS`).

    It is right for valid JSON. Of other bodies it may count anything, and they are refused when they are read.
    """

    def __init__(self) -> None:
        self.fields = 0
        """Of the outermost object or list: commas so far, and 1."""
        self.marks = 0
        self._depth = 0
        """How many objects and lists are open."""
        self._in_string = False
        self._tail = b""
        """A backslash whose character has not arrived."""

    def feed(self, part: bytes) -> None:
        """Raises RequestRefused (400) if the body has too many fields or marks. `part`: its next bytes, at most
        `_SLICE_BYTES`, or else it takes long."""
        text = self._tail + part
        if b"\\" in text:
            self.marks += part.count(b"\\")
            text = text.replace(b"\\\\", b"")
            self._tail = b"\\" if text.endswith(b"\\") else b""
            text = text.removesuffix(b"\\").replace(b'\\"', b"")
        strings = text.split(b'"')
        outside = b"".join(strings[self._in_string :: 2]).translate(None, _PLAIN)
        self._in_string ^= len(strings) % 2 == 0
        self.marks += len(strings) - 1 + len(outside)
        if outside:
            self._count_fields(outside.translate(_ALIKE, _NO_BRACKET))
        if self.fields > MAX_FIELDS:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, f"the request body has more than {MAX_FIELDS} fields")
        if self.marks > MAX_MARKS:
            raise RequestRefused(
                HTTPStatus.BAD_REQUEST,
                f"the request body has too many values: more than {MAX_MARKS} separators, quotes and backslashes",
            )

    def _count_fields(self, marks: bytes) -> None:
        """`marks`: brackets and commas."""
        if b"[" not in marks and b"]" not in marks:
            self.fields += len(marks) * (self._depth == 1)
            return
        depth, fields = self._depth, self.fields
        for mark in marks:  # 64 KiB of brackets take 2 ms
            if mark == _OPENS:
                depth += 1
                fields += depth == 1
            elif mark == _CLOSES:
                depth -= 1
            elif depth == 1:
                fields += 1
        self._depth, self.fields = depth, fields


class BoundedBodies:
    """ASGI middleware that bounds how long a request's body takes, how much memory all take, and what is in it.

    Of many requests that arrive at once a few begin in each turn of the event loop; engines' posts and other requests
    do not wait for each other.
    A body that does not arrive in time is answered 408, and the application gets a disconnect. To read another body
    that is refused raises RequestRefused in the application: 503 if there is no room for it, 400 if it has too many
    parts. An answer to a request whose body is incomplete closes the connection. uvicorn reads no body of a request
    that asks for another protocol, and would take it for the next request, so such a request is answered 400.
    Starlette's routes match a path with a newline behind it, too. A path with unprintable characters is answered 404.
    """

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget
        self._turns, self._posts_turns = Turns(_BEGIN_PER_TURN), Turns(_BEGIN_PER_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_post = scope["path"].startswith(METASERVER_PATH)
        await (self._posts_turns if is_post else self._turns).wait()
        has_body, upgrades = False, scope["method"] == "CONNECT"
        for name, value in scope["headers"]:
            if name in (b"content-length", b"transfer-encoding"):
                has_body = value != b"0"
            elif name == b"connection" and b"upgrade" in value.lower():
                upgrades = True
        has_no_route = not scope["path"].isprintable()
        if upgrades or has_no_route:
            status, why = (HTTPStatus.NOT_FOUND, _NO_PATH) if has_no_route else (HTTPStatus.BAD_REQUEST, _NO_UPGRADE)
            await error_response(status, why, headers={"Connection": "close"})(scope, receive, send)
        elif not has_body:
            await self._app(scope, receive, send)
        else:
            with self._budget.hold(for_tickets=is_post) as held:
                bounded = _BoundedBody(scope, receive, send, self._budget, held)
                await self._app(scope, bounded.receive, bounded.send)


class _BoundedBody:
    """One request with a body."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: BodyBudget, held: HeldBody) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._budget = budget
        self._held = held
        self._structure = Structure()
        self._is_complete = False
        """Whether the whole body has arrived, or the client has left."""
        self._wait: anyio.CancelScope | None = None
        """For a chunk. None: the application has not asked for any."""
        self._deadline = 0.0
        """When the next chunk must be here, on the event loop's clock."""
        self._is_ended = False
        """Whether others needed its room."""
        self._is_late = False
        """Whether the request was answered 408."""

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        if self._wait is None:
            self._deadline = anyio.current_time() + _BODY_SECONDS
            self._budget.arriving(self._held, self._end)
        message: Message = {"type": "http.disconnect"}
        with anyio.CancelScope(deadline=self._deadline) as self._wait:
            message = await self._receive()
        if self._wait.cancelled_caught and not self._is_ended:
            await self._answer_late()
        elif body := message.get("body", b""):
            self._deadline = min(self._deadline + len(body) / _BYTES_PER_SECOND, anyio.current_time() + _BODY_SECONDS)
            self._budget.add(self._held, len(body))
            await self._look_at(body)
        if self._is_ended:
            raise self._budget.full()
        self._is_complete = not message.get("more_body", False)
        if self._is_complete:
            self._budget.arriving(self._held, None)
        return message

    async def _look_at(self, body: bytes) -> None:
        """`body`: the next part. uvicorn may give 320 KiB at once."""
        for at in range(0, len(body), _SLICE_BYTES):
            if at:
                await asyncio.sleep(0)
            self._structure.feed(body[at : at + _SLICE_BYTES])

    def _end(self) -> None:
        self._is_ended = True
        if self._wait is not None:
            self._wait.cancel()

    async def _answer_late(self) -> None:
        self._is_complete = self._is_late = True
        late = error_response(
            HTTPStatus.REQUEST_TIMEOUT, "the request body did not arrive", headers={"Connection": "close"}
        )
        await late(self._scope, self._receive, self._send)

    async def send(self, message: Message) -> None:
        if self._is_complete:
            if not self._is_late:
                await self._send(message)
        elif message["type"] == "http.response.start":
            headers = [header for header in message.get("headers", ()) if header[0].lower() != b"connection"]
            await self._send({**message, "headers": [*headers, (b"connection", b"close")]})
        elif message.get("more_body", False):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_SECONDS):
                    while not self._is_complete:
                        self._is_complete = not (await self._receive()).get("more_body", False)
            await self._send({"type": "http.response.body", "body": b""})
