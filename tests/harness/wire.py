# SPDX-License-Identifier: Apache-2.0
"""TCP relays between processes, which pass bytes on until a test breaks them.

All relays of a `Wire` run on its one thread; tests change what they do from theirs, at any time.
"""

import asyncio
import contextlib
import dataclasses
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal

from harness.ports import release_port, reserve_port
from harness.zmtp import Part, Stream
from vllm_ascend_pd.core.protocol import Message, ProtocolError, decode

HOST = "127.0.0.1"
CHUNK = 1 << 16
_STALL_POLL_S = 0.02
_CALL_TIMEOUT_S = 20.0

Send = Callable[[bytes], Awaitable[None]]
Passage = Callable[[bytes, Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a relay does instead of passing bytes on."""

    refuse: bool = False
    """New connections are reset at once, and those there were are when this begins."""
    stall: bool = False
    """Connections stay, bytes do not move."""
    delay_s: float = 0.0
    """Every piece of at most `CHUNK` bytes waits so long, in its order."""
    cut_after: int | None = None
    """A connection is reset once so many bytes have passed in one direction."""


HEALTHY = Fault()


class _Cut(Exception):
    """Says that the connection must be reset."""


class Wire:
    """The thread of all relays."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._relays: list[Relay] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire", daemon=True)
        self._thread.start()

    def add(self, relay: "Relay") -> "Relay":
        self._relays.append(relay)
        self.call(relay.open())
        return relay

    def call(self, work: Awaitable[None]) -> None:
        """Runs `work` on the thread, and waits for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)  # type: ignore[arg-type]

    def close(self) -> None:
        for relay in self._relays:
            self.call(relay.shut())
            release_port(relay.port)
        self.call(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Relay:
    """Listens at `port`, and connects every client to `target`, which may change."""

    def __init__(self, wire: Wire, target: int = 0) -> None:
        self.port = reserve_port()
        self.url = f"http://{HOST}:{self.port}"
        self.target = target
        self.connections = 0
        """Made so far."""
        self._fault = HEALTHY
        self._wire = wire
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        wire.add(self)

    @contextlib.contextmanager
    def broken(self, fault: Fault) -> Iterator[None]:
        self.set(fault)
        try:
            yield
        finally:
            self.set(HEALTHY)

    def set(self, fault: Fault) -> None:
        self._fault = fault
        if fault.refuse:
            self.reset()

    def reset(self) -> None:
        """Resets all connections."""
        self._wire.call(self._reset_all())

    # On the wire's thread.

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)

    async def shut(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._reset_all()

    async def _reset_all(self) -> None:
        for writer in list(self._open):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            if self._fault.refuse:
                _reset(writer)
                return
            await self._connect(reader, writer, await self._find_target(reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            _reset(writer)
        except asyncio.CancelledError:
            pass  # the wire is closed
        finally:
            self._open.discard(writer)
            with contextlib.suppress(OSError):
                writer.close()

    async def _find_target(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        return self.target

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        there_reader, there_writer = await asyncio.open_connection(HOST, port)
        self._open.add(there_writer)
        try:
            directions = [
                asyncio.ensure_future(self._pump(reader, there_writer, self._passage(True))),
                asyncio.ensure_future(self._pump(there_reader, writer, self._passage(False))),
            ]
            try:
                await asyncio.gather(*directions)
            except (_Cut, OSError):
                for direction in directions:
                    direction.cancel()
                _reset(writer)
                _reset(there_writer)
        finally:
            self._open.discard(there_writer)
            with contextlib.suppress(OSError):
                there_writer.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        passage: Callable[[bytes, Send], Awaitable[None]],
    ) -> None:
        passed, over = 0, False

        async def send(data: bytes) -> None:
            if over or writer.is_closing():  # a message that was held or comes late
                raise ConnectionError("the connection has ended")
            writer.write(data)
            await writer.drain()

        while data := await reader.read(CHUNK):
            await asyncio.sleep(self._fault.delay_s)
            while self._fault.stall:
                await asyncio.sleep(_STALL_POLL_S)
            limit = self._fault.cut_after
            if limit is not None and passed + len(data) > limit:
                await send(data[: max(0, limit - passed)])
                raise _Cut
            passed += len(data)
            await passage(data, send)
        over = True
        if writer.can_write_eof():
            writer.write_eof()

    def _passage(self, outward: bool) -> Passage:
        """Passes on the bytes of one direction of a new connection, or not. `outward`: those of the client."""

        async def unchanged(data: bytes, send: Send) -> None:
            await send(data)

        return unchanged


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection with a reset."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclasses.dataclass
class Rule:
    """What happens to the next `times` messages of a kind (None: all of them)."""

    kind: type[Message]
    do: Literal["lose", "twice", "late", "hold", "reset"]
    """`late`: others overtake it. `reset`: the connection is reset in the middle of it."""
    times: int | None = None
    seconds: float = 0.0
    """Of `late`."""
    done: int = 0

    def applies(self, message: Message) -> bool:
        return isinstance(message, self.kind) and (self.times is None or self.done < self.times)


class SideChannel(Relay):
    """A SOCKS5 proxy through which prefill's ranks reach decode's listeners: it tells their messages apart."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.rules: list[Rule] = []
        self.seen: Counter[str] = Counter()
        """Messages of each kind so far, whatever became of them."""
        self.held: list[tuple[Message, Send, bytes]] = []
        self._recorded: list[bytes] = []
        self._recording = False
        self._outward: list[Send] = []

    @contextlib.contextmanager
    def ruled(self, *rules: Rule) -> Iterator[None]:
        """Then what is held goes on its way."""
        self.rules = list(rules)
        try:
            yield
        finally:
            self.rules = []
            self._wire.call(self._release())

    def record(self) -> None:
        """Keeps messages of prefill for `replay` from now on."""
        self._recording = True

    def replay(self) -> int:
        """Sends all recorded messages again, on every connection of prefill. Returns how many there were."""
        self._wire.call(self._replay())
        return len(self._recorded)

    # On the wire's thread.

    async def _release(self) -> None:
        held, self.held = self.held, []
        for _, send, raw in held:
            with contextlib.suppress(OSError):
                await send(raw)

    async def _replay(self) -> None:
        self._recording = False
        for send in list(self._outward):
            for raw in self._recorded:
                try:
                    await send(raw)
                except OSError:
                    self._outward.remove(send)
                    break

    async def _find_target(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        _, methods = await reader.readexactly(2)
        await reader.readexactly(methods)
        writer.write(b"\x05\x00")
        request = await reader.readexactly(4)
        size = {1: 4, 4: 16, 3: None}[request[3]]
        if size is None:
            [size] = await reader.readexactly(1)
        await reader.readexactly(size)
        port = int.from_bytes(await reader.readexactly(2), "big")
        writer.write(b"\x05\x00\x00\x01" + bytes(6))
        return port

    def _passage(self, outward: bool) -> Passage:
        stream = Stream()
        greeted = False

        async def by_message(data: bytes, send: Send) -> None:
            nonlocal greeted
            for part in stream.feed(data):
                if part.payload is None:
                    await send(part.raw)
                    continue
                if outward and not greeted:
                    greeted = True
                    self._outward.append(send)
                await self._decide(outward, part, send)

        return by_message

    async def _decide(self, outward: bool, part: Part, send: Send) -> None:
        assert part.payload is not None
        try:
            _, message = decode(part.payload)
        except ProtocolError:
            await send(part.raw)
            return
        if outward and self._recording:
            self._recorded.append(part.raw)
        rule = next((rule for rule in self.rules if rule.applies(message)), None)
        if rule is not None:
            rule.done += 1
        if rule is None:
            await send(part.raw)
        elif rule.do == "twice":
            await send(part.raw + part.raw)
        elif rule.do == "late":
            asyncio.get_running_loop().call_later(rule.seconds, lambda: asyncio.ensure_future(_try(send, part.raw)))
        elif rule.do == "hold":
            self.held.append((message, send, part.raw))
        elif rule.do == "reset":
            await send(part.raw[: len(part.raw) // 2])
            self.seen[type(message).__name__] += 1
            raise _Cut
        self.seen[type(message).__name__] += 1


async def _try(send: Send, data: bytes) -> None:
    with contextlib.suppress(OSError):
        await send(data)


class Sessions(Relay):
    """In front of a Mooncake engine over TCP: `target` is its handshake port. What it says about where to send data
    is changed, so that data pass through the relay `data`."""

    _DATA_PORT = re.compile(rb'"tcp_data_port":(\d{5})\b')

    def __init__(self, wire: Wire) -> None:
        self.data = Relay(wire)
        super().__init__(wire)

    def _passage(self, outward: bool) -> Passage:
        if outward:
            return super()._passage(outward)
        buffer = b""

        async def by_answer(data: bytes, send: Send) -> None:
            """A length of 8 bytes, then a type of one and JSON, which keeps its length."""
            nonlocal buffer
            buffer += data
            while len(buffer) >= 8:
                end = 8 + int.from_bytes(buffer[:8], "little")
                if len(buffer) < end:
                    return
                answer, buffer = buffer[:end], buffer[end:]
                if found := self._DATA_PORT.search(answer):
                    self.data.target = int(found[1])
                    answer = answer.replace(found[1], str(self.data.port).encode())
                await send(answer)

        return by_answer
