# SPDX-License-Identifier: Apache-2.0
"""The side channel: small typed messages between engines, over ZMQ.

`Server` answers on one thread; `Client` talks to any number of servers from one thread. Neither ever blocks
its caller on the network, every request ends in exactly one callback, and a callback must not block either.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from vllm_ascend_pd.core.protocol import (
    MAX_DESCRIPTION_BYTES,
    MAX_MESSAGE_BYTES,
    Message,
    Problem,
    ProtocolError,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

# How often threads look at deadlines when no message wakes them.
_TICK_S = 0.05
# Requests a server has not yet read, and replies a peer has not yet taken, per connection.
_HIGH_WATER_MARK = 4096


class SideChannelError(RuntimeError):
    """A side channel that could not be opened, or a request that got no usable answer."""


class Peer:
    """Where a server's message came from: lets it send something unasked later."""

    __slots__ = ("_identity", "_server")

    def __init__(self, server: "Server", identity: bytes) -> None:
        self._server = server
        self._identity = identity

    def send(self, message: Message) -> None:
        """Queues `message`. It is lost if the peer is gone: nothing may depend on its arrival alone."""
        self._server._post(self._identity, message)


class _Loop:
    """A thread that owns ZMQ sockets, with a mailbox through which other threads wake it."""

    def __init__(self, name: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._mailbox: deque[Callable[[], None]] = deque()
        self._mailbox_in = self._socket(zmq.PAIR)
        self._mailbox_out = self._socket(zmq.PAIR)
        self._mailbox_lock = threading.Lock()
        address = f"inproc://mailbox-{id(self)}"
        self._mailbox_out.bind(address)
        self._mailbox_in.connect(address)
        self._poller.register(self._mailbox_out, zmq.POLLIN)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def call(self, action: Callable[[], None]) -> bool:
        """Runs `action` on the thread, soon. False after close: then it never runs."""
        with self._mailbox_lock:
            if self._closing.is_set():
                return False
            self._mailbox.append(action)
            self._wake()
            return True

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # then unread wake-ups are waiting already
            self._mailbox_in.send(b"", zmq.DONTWAIT)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception:
                # A defect in a callback must not silence the whole channel: deadlines still have to pass.
                logger.exception("side channel: a callback failed")
        while self._mailbox:
            self._mailbox.popleft()()
        self._on_close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(int(_TICK_S * 1000)))
        if self._mailbox_out in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._mailbox_out.recv(zmq.DONTWAIT)
        while self._mailbox:
            self._mailbox.popleft()()
        self._on_ready(ready)
        self._on_tick(time.monotonic())

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        raise NotImplementedError

    def _on_tick(self, now: float) -> None:
        raise NotImplementedError

    def _on_close(self) -> None:
        """The thread is about to end."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and closes all sockets. Safe to call twice."""
        with self._mailbox_lock:
            if self._closing.is_set():
                return
            self._wake()
            self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._context.destroy(linger=0)


class Server(_Loop):
    """Listens on `host`, answers each message with what `handle(message, peer)` returns.

    `port` 0 picks a free one. `tick(now)` is called often, on the same thread: with all state touched only
    from `handle` and `tick`, a server needs no locks. Raises SideChannelError when it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handle: Callable[[Message, Peer], Message],
        tick: Callable[[float], None] = lambda now: None,
        name: str = "pd-side-channel",
    ) -> None:
        super().__init__(name)
        self._handle = handle
        self._tick = tick
        self.rejected = 0
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._router.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._router.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        if ":" in host:
            self._router.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SideChannelError(f"cannot listen on {host}:{port}: {error}") from error
        endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.endpoint = endpoint.decode().rstrip("\0")
        self._poller.register(self._router, zmq.POLLIN)
        self._thread.start()

    def _post(self, identity: bytes, message: Message) -> None:
        self.call(lambda: self._send(identity, 0, message))

    def _send(self, identity: bytes, seq: int, message: Message) -> None:
        try:
            self._router.send_multipart([identity, encode(seq, message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            # The peer reads too slowly or is gone; it will ask again.
            logger.warning("side channel: dropped a %s: %s", type(message).__name__, error)

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        if self._router not in ready:
            return
        for _ in range(_HIGH_WATER_MARK):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            identity, payload = frames[0], frames[-1]
            seq = 0
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"{len(frames) - 1} frames, expected 1")
                seq, message = decode(payload)
                reply = self._handle(message, Peer(self, identity))
            except ProtocolError as error:
                self.rejected += 1
                reply = Problem(str(error))
            except Exception:
                logger.exception("side channel: a request could not be served")
                reply = Problem("internal error, see this side's log")
            self._send(identity, seq, reply)

    def _on_tick(self, now: float) -> None:
        self._tick(now)


@dataclass
class _Pending:
    endpoint: str
    deadline: float
    done: Callable[[Message | SideChannelError], None]


class Client(_Loop):
    """Sends requests to servers. `unasked(endpoint, message)` gets what servers send on their own;
    `tick(now)` is called often on the same thread."""

    def __init__(
        self,
        unasked: Callable[[str, Message], None] = lambda endpoint, message: None,
        tick: Callable[[float], None] = lambda now: None,
        name: str = "pd-side-channel",
    ) -> None:
        super().__init__(name)
        self._unasked = unasked
        self._tick = tick
        self._seq = itertools.count(1)
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._endpoints: dict[zmq.Socket[bytes], str] = {}
        self._pending: dict[int, _Pending] = {}
        self._thread.start()

    def request(
        self,
        endpoint: str,
        message: Message,
        timeout_s: float,
        done: Callable[[Message | SideChannelError], None],
    ) -> None:
        """Sends `message`; `done` gets the answer or a SideChannelError, on the client's thread."""
        deadline = time.monotonic() + timeout_s
        if not self.call(lambda: self._start(endpoint, message, deadline, done)):
            done(SideChannelError("the side channel is closed"))

    def forget(self, endpoint: str) -> None:
        """Closes the connection to `endpoint`; requests under way end with an error."""
        self.call(lambda: self._disconnect(endpoint))

    def _start(
        self,
        endpoint: str,
        message: Message,
        deadline: float,
        done: Callable[[Message | SideChannelError], None],
    ) -> None:
        seq = next(self._seq)
        try:
            self._dealer(endpoint).send(encode(seq, message), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            done(SideChannelError(f"cannot send to {endpoint}: {error}"))
            return
        self._pending[seq] = _Pending(endpoint, deadline, done)

    def _dealer(self, endpoint: str) -> "zmq.Socket[bytes]":
        dealer = self._dealers.get(endpoint)
        if dealer is None:
            dealer = self._socket(zmq.DEALER)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_DESCRIPTION_BYTES)
            dealer.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            dealer.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
            if "[" in endpoint:
                dealer.setsockopt(zmq.IPV6, 1)
            dealer.connect(endpoint)
            self._poller.register(dealer, zmq.POLLIN)
            self._dealers[endpoint] = dealer
            self._endpoints[dealer] = endpoint
        return dealer

    def _disconnect(self, endpoint: str) -> None:
        dealer = self._dealers.pop(endpoint, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            del self._endpoints[dealer]
            dealer.close(linger=0)
        for seq in [seq for seq, pending in self._pending.items() if pending.endpoint == endpoint]:
            self._pending.pop(seq).done(SideChannelError(f"connection to {endpoint} was closed"))

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        for dealer in ready:
            endpoint = self._endpoints.get(dealer)
            if endpoint is not None:
                self._receive(dealer, endpoint)

    def _receive(self, dealer: "zmq.Socket[bytes]", endpoint: str) -> None:
        while True:
            try:
                frames = dealer.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            try:
                seq, message = decode(frames[-1])
            except ProtocolError as error:
                logger.warning("side channel: %s sent %s", endpoint, error)
                continue
            if seq == 0:
                self._unasked(endpoint, message)
                continue
            pending = self._pending.get(seq)
            if pending is not None and pending.endpoint == endpoint:
                del self._pending[seq]
                pending.done(message)

    def _on_close(self) -> None:
        for pending in self._pending.values():
            pending.done(SideChannelError("the side channel was closed"))
        self._pending.clear()

    def _on_tick(self, now: float) -> None:
        for seq in [seq for seq, pending in self._pending.items() if now >= pending.deadline]:
            pending = self._pending.pop(seq)
            pending.done(SideChannelError(f"{pending.endpoint} did not answer in time"))
        self._tick(now)
