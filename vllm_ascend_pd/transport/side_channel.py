# SPDX-License-Identifier: Apache-2.0
"""The side channel: small typed messages between engines, over ZMQ.

`SideChannelServer` answers on one thread. `SideChannelClient` talks to any number of servers from one thread. Neither
blocks its caller on the network. Every request ends in exactly one callback. A callback must not block either.
"""

import itertools
import logging
import time
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
from vllm_ascend_pd.transport.curve import Guard, Keys
from vllm_ascend_pd.transport.loop import Loop
from vllm_ascend_pd.transport.socket_limiter import SocketLimiter, default_limit

logger = logging.getLogger(__name__)

# How often what resting connections have brought is read.
_REST_LOOK_S = 1.0
# Requests a peer has not yet taken, per connection; messages taken in one turn.
_HIGH_WATER_MARK = 4096
# Replies a peer has not yet taken, per connection: it may ask so much at once without losing any.
_UNREAD_REPLIES = 1024
# Messages that have come and wait to be taken, per connection: times their size, what a peer can make us keep.
_UNREAD_REQUESTS = 256
_UNREAD_ANSWERS = 32
# Who connects has this long to show that it speaks ZMTP.
_HANDSHAKE_S = 10.0


class SideChannelError(RuntimeError):
    """A side channel that could not be opened, or a request that got no usable answer."""


class ClientConnection:
    """Where a server's message came from: lets it send something unasked later."""

    __slots__ = ("_identity", "_server")

    def __init__(self, server: "SideChannelServer", identity: bytes) -> None:
        self._server = server
        self._identity = identity

    def send(self, message: Message, gone: Callable[[], None] = lambda: None) -> None:
        """Queues `message`. It is lost if the peer is gone, or does not read: nothing may depend on its arrival alone.
        `gone` is called, on the server's thread, if its connection is closed."""
        self._server._post(self._identity, message, gone)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same connection."""
        return isinstance(other, ClientConnection) and (other._server, other._identity) == (
            self._server,
            self._identity,
        )

    def __hash__(self) -> int:
        return hash(self._identity)


class SideChannelServer(Loop):
    """Listens on `host`, answers each message with what `handle(message, peer)` returns.

    `port` 0 picks a free one. `tick(now)` is called 20 times a second, on the same thread: with all state touched only
    from `handle` and `tick`, a server needs no locks. With `keys`, clients that have other ones or none get nothing.
    `unread_replies`: how many wait for a peer that does not read; further ones are `dropped`, which counts them.
    `max_connections`: `socket_limiter.default_limit()` if None. `rejected` counts messages that could not be read,
    `refused_connections` connections that were no peer's or too many. Raises SideChannelError when it cannot listen.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handle: Callable[[Message, ClientConnection], Message],
        tick: Callable[[float], None] = lambda now: None,
        name: str = "pd-side-channel",
        keys: Keys | None = None,
        unread_replies: int = _UNREAD_REPLIES,
        max_connections: int | None = None,
    ) -> None:
        super().__init__(name, tick)
        self._handle = handle
        self.rejected = 0
        self.dropped = 0
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error, not silence, when a peer is gone
        self._router.setsockopt(zmq.RCVHWM, _UNREAD_REQUESTS)
        self._router.setsockopt(zmq.SNDHWM, unread_replies)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_S * 1000))
        self._guard = None if keys is None else Guard(keys, self._context, self._router)
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
        self._limiter = SocketLimiter(self._router, max_connections or default_limit(), MAX_MESSAGE_BYTES)
        self._poller.register(self._router, zmq.POLLIN)
        if self._guard is not None:
            self._poller.register(self._guard.socket, zmq.POLLIN)
        self._thread.start()

    @property
    def refused_connections(self) -> int:
        return self._limiter.refused

    def _post(self, identity: bytes, message: Message, gone: Callable[[], None]) -> None:
        def send() -> None:
            if not self._send(identity, 0, message):
                gone()

        self.call(send)

    def _send(self, identity: bytes, seq: int, message: Message) -> bool:
        """Whether the peer's connection is still there."""
        try:
            self._router.send_multipart([identity, encode(seq, message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                logger.debug("side channel: a %s to a peer that is gone", type(message).__name__)
                return False
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, ...: who never reads fills no log
                logger.warning(
                    "side channel: dropped a %s, as its receiver reads too slowly (%s; %d so far): it will ask again",
                    type(message).__name__,
                    error,
                    self.dropped,
                )
        return True

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        self._limiter.turn(time.monotonic())
        if self._guard is not None:
            self._guard.attend()
        if self._router not in ready:
            return
        for _ in range(_HIGH_WATER_MARK):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            identity, payload = frames[0].bytes, frames[-1].bytes
            source = _source(frames[-1])
            self._limiter.delivered(source, readable=False)
            seq = 0
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"{len(frames) - 1} frames, expected 1")
                seq, message = decode(payload)
                self._limiter.delivered(source, readable=True)
                reply = self._handle(message, ClientConnection(self, identity))
            except ProtocolError as error:
                self.rejected += 1
                reply = Problem(str(error))
            except Exception:
                logger.exception("side channel: a request could not be served")
                reply = Problem("internal error, see this side's log")
            self._send(identity, seq, reply)

    def _on_close(self) -> None:
        self._limiter.close()


def _source(frame: zmq.Frame) -> int:
    """The descriptor of the connection that a frame came from; -1 if it spoke an old ZMTP, as no peer does."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


@dataclass
class _Pending:
    endpoint: str
    deadline: float
    done: Callable[[Message | SideChannelError], None]


class SideChannelClient(Loop):
    """Sends requests to servers. `unasked(endpoint, message)` gets what servers send on their own;
    `tick(now)` is called 20 times a second on the same thread; `rejected` counts what could not be read. With
    `keys`, only servers that have them get anything."""

    def __init__(
        self,
        unasked: Callable[[str, Message], None] = lambda endpoint, message: None,
        tick: Callable[[float], None] = lambda now: None,
        name: str = "pd-side-channel",
        keys: Keys | None = None,
    ) -> None:
        super().__init__(name, tick)
        self._keys = keys
        self._unasked = unasked
        self.rejected = 0
        self._seq = itertools.count(1)
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._endpoints: dict[zmq.Socket[bytes], str] = {}
        self._rest_look_at = 0.0
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

    def rest(self, endpoint: str) -> None:
        """Nothing is expected from `endpoint` until the next request to it: what it sends is read once a second."""
        self.call(lambda: self._rest(endpoint))

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
            done(SideChannelError(f"nothing can be sent: {error}"))
            return
        self._pending[seq] = _Pending(endpoint, deadline, done)

    def _dealer(self, endpoint: str) -> "zmq.Socket[bytes]":
        dealer = self._dealers.get(endpoint)
        if dealer is None:
            dealer = self._socket(zmq.DEALER)
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_DESCRIPTION_BYTES)
            dealer.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            dealer.setsockopt(zmq.RCVHWM, _UNREAD_ANSWERS)
            if "[" in endpoint:
                dealer.setsockopt(zmq.IPV6, 1)
            if self._keys is not None:
                self._keys.protect_client(dealer)
            try:
                dealer.connect(endpoint)
            except zmq.ZMQError:
                dealer.close()
                raise
            self._dealers[endpoint] = dealer
            self._endpoints[dealer] = endpoint
        if dealer not in self._poller:
            self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def _rest(self, endpoint: str) -> None:
        """Polling a connection takes as long where nothing comes as where much does."""
        dealer = self._dealers.get(endpoint)
        if dealer is None or dealer not in self._poller:
            return
        if not any(pending.endpoint == endpoint for pending in self._pending.values()):
            self._poller.unregister(dealer)

    def _disconnect(self, endpoint: str) -> None:
        dealer = self._dealers.pop(endpoint, None)
        if dealer is not None:
            if dealer in self._poller:
                self._poller.unregister(dealer)
            del self._endpoints[dealer]
            dealer.close(linger=0)
        for seq in [seq for seq, pending in self._pending.items() if pending.endpoint == endpoint]:
            self._pending.pop(seq).done(SideChannelError("the connection was closed"))

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        for dealer in ready:
            endpoint = self._endpoints.get(dealer)
            if endpoint is not None:
                self._receive(dealer, endpoint)

    def _receive(self, dealer: "zmq.Socket[bytes]", endpoint: str) -> None:
        for _ in range(_UNREAD_ANSWERS):  # then it is others' turn, and deadlines'
            try:
                frames = dealer.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            try:
                seq, message = decode(frames[-1])
            except ProtocolError as error:
                self._reject(endpoint, error)
                continue
            if seq == 0:
                self._unasked(endpoint, message)
                continue
            pending = self._pending.get(seq)
            if pending is not None and pending.endpoint == endpoint:
                del self._pending[seq]
                pending.done(message)

    def _reject(self, endpoint: str, error: ProtocolError) -> None:
        self.rejected += 1
        if self.rejected & (self.rejected - 1) == 0:  # the 1st, 2nd, 4th, ...: as many lines as it likes are not its
            logger.warning("side channel: %s sent %s (%d unreadable messages so far)", endpoint, error, self.rejected)

    def _on_close(self) -> None:
        for pending in self._pending.values():
            pending.done(SideChannelError("the side channel was closed"))
        self._pending.clear()

    def _on_tick(self, now: float) -> None:
        for seq in [seq for seq, pending in self._pending.items() if now >= pending.deadline]:
            pending = self._pending.pop(seq)
            hint = "" if self._keys is None else "; does it have the same side_channel_key_file?"
            pending.done(SideChannelError(f"no answer in time{hint}"))
        if now >= self._rest_look_at:
            self._rest_look_at = now + _REST_LOOK_S
            for endpoint, dealer in list(self._dealers.items()):
                if dealer not in self._poller:
                    self._receive(dealer, endpoint)
        self._tick(now)
