# SPDX-License-Identifier: Apache-2.0
"""The side channel: small typed messages between engines, over ZMQ.

`SideChannelServer` answers on one thread. `SideChannelClient` talks to any number of servers from one thread. Neither
blocks its caller on the network. Every request ends in exactly one callback. A callback must not block either.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import zmq

from vllm_ascend_pd.core.bounds import MAX_TURN_S
from vllm_ascend_pd.core.hosts import AnyHost, HostList
from vllm_ascend_pd.core.protocol import (
    MAX_MESSAGE_BYTES,
    Message,
    Problem,
    ProtocolError,
    decode,
    encode,
)
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.transport.curve import Guard, side_channel_keys
from vllm_ascend_pd.transport.dealer import UNREAD_ANSWERS, Dealer
from vllm_ascend_pd.transport.loop import Loop
from vllm_ascend_pd.transport.port_holder import held_by

logger = logging.getLogger(__name__)

# Seconds between two reads of resting connections.
_REST_LOOK_S = 1.0
# Replies per connection that a client has not taken yet. It may send so many requests at once without losing a reply.
_UNREAD_REPLIES = 1024
# Received messages per connection that wait to be taken. Times their size, this is what a peer can make us keep.
_UNREAD_REQUESTS = 256
# A client must complete ZMTP's handshake within so many seconds.
_HANDSHAKE_S = 10.0
# Connections that the kernel keeps until libzmq accepts them. All ranks of many engines may connect at once.
_BACKLOG = 1024


class SideChannelError(RuntimeError):
    """A side channel could not be opened, or a request got no usable answer."""


@dataclass(frozen=True, slots=True)
class ClientConnection:
    """The connection that a message came from. The server may send on it later, on any thread."""

    _server: "SideChannelServer"
    _identity: bytes
    # The peer's address. Peers behind one address count as one.
    host: str = ""

    def send(self, message: Message, gone: Callable[[], None] = lambda: None) -> None:
        """Queues `message`. It may be lost, so nothing may depend on its arrival alone.

        `gone` is called on the server's thread if the connection is closed.
        """

        def send() -> None:
            if not self._server._send(self._identity, 0, message):
                gone()

        self._server.call(send)


class SideChannelServer(Loop):
    """Answers messages on one thread, which also passes time. State that only this thread touches needs no locks."""

    def __init__(
        self,
        host: str,
        port: int,
        handle: Callable[[Message, ClientConnection], Message],
        tick: Callable[[float], None] = lambda now: None,
        name: str = "pd-side-channel",
        secret: Secret | None = None,
        unread_replies: int = _UNREAD_REPLIES,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        unread_requests: int = _UNREAD_REQUESTS,
        hosts: HostList | None = None,
    ) -> None:
        """Listens, and starts the thread.

        `port`: 0 picks a free one.
        `handle`: `handle(message, connection)` returns the answer. Runs on the thread.
        `tick`: `tick(now)` runs on the thread 20 times a second.
        `secret`: the cluster's. Clients without the one in use get nothing.
        `unread_replies`: how many replies wait for a client that does not read. Further ones are dropped.
        `max_message_bytes`: a connection with a longer message is closed.
        `unread_requests`: how many messages of a connection wait to be read.
        `hosts`: clients elsewhere are refused in the handshake. None: there may be clients anywhere.

        Raises SideChannelError if it cannot listen.
        """
        super().__init__(name, tick)
        self._handle = handle
        # Messages that could not be read. The thread changes it.
        self.rejected = 0
        # Replies that clients did not read in time. The thread changes it.
        self.dropped = 0
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a closed connection is an error
        self._router.setsockopt(zmq.RCVHWM, unread_requests)
        self._router.setsockopt(zmq.SNDHWM, unread_replies)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_S * 1000))
        self._router.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._guard = Guard(self._context, self._router, secret, hosts or AnyHost())
        if ":" in host:
            self._router.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SideChannelError(f"cannot listen on {host}:{port}: {error}{held_by(port, error.errno)}") from error
        endpoint = self._router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.endpoint = endpoint.decode().rstrip("\0")
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._guard.socket, zmq.POLLIN)
        self._thread.start()

    @property
    def refused(self) -> int:
        """Handshakes of clients that were not admitted."""
        return self._guard.refused

    def _send(self, identity: bytes, seq: int, message: Message) -> bool:
        """Sends a message. Returns False if the connection is closed."""
        frames = [identity, encode(seq, message)]
        try:
            try:
                self._router.send_multipart(frames, zmq.DONTWAIT)
            except zmq.Again:
                # ZMQ looks only every millisecond at what has left the queue. Reading EVENTS makes it look now.
                self._router.getsockopt(zmq.EVENTS)
                self._router.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                logger.debug("side channel: a %s was not sent, because the peer is gone", type(message).__name__)
                return False
            self.dropped += 1
            if (
                self.dropped & (self.dropped - 1) == 0
            ):  # log the 1st, 2nd, 4th, ...: a client that never reads must not fill the log
                logger.warning(
                    "side channel: dropped a %s, as its receiver reads too slowly (%s; %d so far): it will ask again",
                    type(message).__name__,
                    error,
                    self.dropped,
                )
        return True

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        self._guard.attend()
        if self._router not in ready:
            return
        turn_ends = time.monotonic() + MAX_TURN_S
        while time.monotonic() < turn_ends:  # then deadlines and other threads get their turn
            try:
                sender = self._router.recv(zmq.DONTWAIT, copy=False)
                frames = self._router.recv_multipart(zmq.DONTWAIT)  # all frames come at once
            except zmq.Again:
                return
            identity = sender.bytes
            seq = 0
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames, expected 1")
                seq, message = decode(frames[0])
                reply = self._handle(message, ClientConnection(self, identity, str(sender.get("Peer-Address"))))
            except ProtocolError as error:
                self.rejected += 1
                reply = Problem(str(error))
            except Exception:
                logger.exception("side channel: a request could not be served")
                reply = Problem("internal error, see this side's log")
            self._send(identity, seq, reply)


@dataclass
class _Pending:
    """A request that waits for its answer."""

    endpoint: str
    # In seconds of `time.monotonic`.
    deadline: float
    # Called once, with the answer or an error.
    done: Callable[[Message | SideChannelError], None]
    # What was sent. It is sent again on a new connection.
    frame: bytes


class SideChannelClient(Loop):
    """Sends requests to any number of servers, on one thread."""

    def __init__(
        self,
        unasked: Callable[[str, Message], None] = lambda endpoint, message: None,
        tick: Callable[[float], None] = lambda now: None,
        name: str = "pd-side-channel",
        secret: Secret | None = None,
    ) -> None:
        """Starts the thread.

        `unasked`: `unasked(endpoint, message)` gets messages that servers send without a request. Runs on the thread.
        `tick`: `tick(now)` runs on the thread 20 times a second.
        `secret`: the cluster's. Servers without it get nothing. A server may come back with it: the client connects
            again, and sends requests again that are in flight then. While the secret is being changed, a server may
            have the old or the new one in use, and the client finds out which.
        """
        super().__init__(name, tick)
        self._keys = [] if secret is None else side_channel_keys(secret)
        self._unasked = unasked
        # The thread owns all of these.
        # Messages that could not be read.
        self.rejected = 0
        self._seq = itertools.count(1)
        # Connections, by endpoint and by socket.
        self._dealers: dict[str, Dealer] = {}
        self._by_socket: dict[zmq.Socket[bytes], Dealer] = {}
        # When to read resting connections next.
        self._rest_look_at = 0.0
        # Requests without an answer, by `seq`.
        self._pending: dict[int, _Pending] = {}
        self._thread.start()

    def request(
        self,
        endpoint: str,
        message: Message,
        timeout_s: float,
        done: Callable[[Message | SideChannelError], None],
    ) -> None:
        """Sends `message`. Any thread may call it.

        `done` is called once, with the answer or a SideChannelError: on the client's thread, or at once if the client
        is closed.
        """
        deadline = time.monotonic() + timeout_s
        if not self.call(lambda: self._start(endpoint, message, deadline, done)):
            done(SideChannelError("the side channel is closed"))

    def rest(self, endpoint: str) -> None:
        """Reads messages from `endpoint` only once a second, until the next request to it."""
        self.call(lambda: self._rest(endpoint))

    def forget(self, endpoint: str) -> None:
        """Closes the connection to `endpoint`. Requests in flight end with an error."""
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
            frame = encode(seq, message)
            self._dealer(endpoint).socket.send(frame, zmq.DONTWAIT)
        except Exception as error:  # noqa: BLE001 - `done` gets it
            done(SideChannelError(f"nothing can be sent: {error}"))
            return
        self._pending[seq] = _Pending(endpoint, deadline, done, frame)

    def _dealer(self, endpoint: str) -> Dealer:
        """Returns the connection to `endpoint`, which is polled then."""
        dealer = self._dealers.get(endpoint)
        if dealer is None:
            dealer = Dealer(self._socket, endpoint, self._keys)
            self._add(dealer)
        elif dealer.socket not in self._poller:
            self._poller.register(dealer.socket, zmq.POLLIN)
        return dealer

    def _add(self, dealer: Dealer) -> None:
        self._dealers[dealer.endpoint] = dealer
        self._by_socket[dealer.socket] = dealer
        self._poller.register(dealer.socket, zmq.POLLIN)

    def _remove(self, dealer: Dealer) -> None:
        del self._dealers[dealer.endpoint], self._by_socket[dealer.socket]
        if dealer.socket in self._poller:
            self._poller.unregister(dealer.socket)

    def _rest(self, endpoint: str) -> None:
        """Stops polling an idle connection, which would cost as much as polling a busy one."""
        dealer = self._dealers.get(endpoint)
        if dealer is None or dealer.socket not in self._poller:
            return
        if not self._in_flight(endpoint):
            self._poller.unregister(dealer.socket)

    def _disconnect(self, endpoint: str) -> None:
        dealer = self._dealers.get(endpoint)
        if dealer is not None:
            self._remove(dealer)
            dealer.close()
        self._fail(self._in_flight(endpoint), "the connection was closed")

    def _connect_again(self, dealer: Dealer) -> None:
        """Replaces a connection whose handshake has failed, and sends again what is in flight."""
        self._remove(dealer)
        in_flight = self._in_flight(dealer.endpoint)
        try:
            other = dealer.replaced()
        except zmq.ZMQError as error:
            self._fail(in_flight, f"nothing can be sent: {error}")
            return
        self._add(other)
        for seq in in_flight:
            try:
                other.socket.send(self._pending[seq].frame, zmq.DONTWAIT)
            except zmq.ZMQError as error:
                self._fail([seq], f"nothing can be sent: {error}")

    def _in_flight(self, endpoint: str) -> list[int]:
        """Returns the `seq` of each request to `endpoint` without an answer, in the order in which they were sent."""
        return [seq for seq, pending in self._pending.items() if pending.endpoint == endpoint]

    def _fail(self, requests: Iterable[int], reason: str) -> None:
        """Ends `requests`, each by its `seq`, with an error."""
        for seq in requests:
            self._call(partial(self._pending.pop(seq).done, SideChannelError(reason)))

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        for socket in ready:
            dealer = self._by_socket.get(socket)
            if dealer is not None:
                self._receive(dealer)

    def _receive(self, dealer: Dealer) -> None:
        endpoint = dealer.endpoint
        for _ in range(UNREAD_ANSWERS):  # then other connections and deadlines get their turn
            try:
                frames = dealer.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            try:
                seq, message = decode(frames[-1])
            except ProtocolError as error:
                self._reject(endpoint, error)
                continue
            if seq == 0:
                self._call(partial(self._unasked, endpoint, message))
                continue
            pending = self._pending.get(seq)
            if pending is not None and pending.endpoint == endpoint:
                del self._pending[seq]
                self._call(partial(pending.done, message))

    def _reject(self, endpoint: str, error: ProtocolError) -> None:
        self.rejected += 1
        if self.rejected & (self.rejected - 1) == 0:  # the 1st, 2nd, 4th, ...: a peer must not fill the log
            logger.warning("side channel: %s sent %s (%d unreadable messages so far)", endpoint, error, self.rejected)

    def _on_close(self) -> None:
        self._fail(list(self._pending), "the side channel was closed")

    def _on_tick(self, now: float) -> None:
        hint = "; does it have the same secret?" if self._keys else ""
        self._fail([seq for seq, each in self._pending.items() if now >= each.deadline], f"no answer in time{hint}")
        for dealer in list(self._dealers.values()):
            if dealer.is_due(now):
                self._connect_again(dealer)
        if now >= self._rest_look_at:
            self._rest_look_at = now + _REST_LOOK_S
            for dealer in list(self._dealers.values()):
                if dealer.socket not in self._poller:
                    self._receive(dealer)
        self._tick(now)
