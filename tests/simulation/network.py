# SPDX-License-Identifier: Apache-2.0
"""ZMQ's sockets and wake-up datagrams in memory. Messages are late, lost, repeated and cut off as the network says."""

import itertools
from collections import deque
from types import ModuleType
from typing import Any

import zmq as real_zmq

from simulation.kernel import Process, Task, kernel

# ZMQ connects again for ever; so many seconds are for ever here.
_RECONNECTS_S = 60.0
_RECONNECT_EVERY_S = 0.1
# The kernel keeps so many unread datagrams of a socket.
_MOST_DATAGRAMS = 8


class Network:
    """The network of one run."""

    def __init__(self, loss: float, repetition: float, delay: float) -> None:
        """Shares of messages that are lost, that arrive twice, and that are delayed by up to 0.3 s."""
        self._loss = loss
        self._repetition = repetition
        self._delay = delay
        self.listeners: dict[str, Socket] = {}
        self.in_process: dict[tuple[int, str], Socket] = {}
        self.datagrams: dict[str, Datagrams] = {}
        self.by_fd: dict[int, Datagrams] = {}
        self.numbers = itertools.count(10_000)
        self._ports = itertools.count(20_000)
        # Processes whose connection has broken. They are not stopped afterwards: docs/design.md, "Stopped processes".
        self.broken: set[Process] = set()
        # Pairs of engines without a connection, and until when.
        self._cut_off: dict[frozenset[str], float] = {}

    def new_port(self) -> int:
        return next(self._ports)

    def cut_off(self, one: str, other: str, seconds: float) -> None:
        """Lets nothing pass between two engines for a while."""
        self._cut_off[frozenset((one, other))] = kernel().now + seconds

    def cut_off_until(self, one: Process, other: Process) -> float:
        """Returns until when nothing passes between two processes; a time in the past if it does."""
        return self._cut_off.get(frozenset((one.engine, other.engine)), 0.0) if self._cut_off else 0.0

    def deliveries(self, link: str) -> list[float]:
        """Returns the delays, in seconds, after which a message on `link` arrives: once, twice or never."""
        draw = kernel().draws(link)
        if draw.random() < self._loss:
            return []
        times = 2 if draw.random() < self._repetition else 1
        delays = []
        for _ in range(times):
            delay_s = 0.0001 + 0.0004 * draw.random()
            if draw.random() < self._delay:
                delay_s += 0.3 * draw.random()
            delays.append(delay_s)
        return delays

    def break_connection(self, share: float) -> None:
        """Breaks one of the connections, chosen by `share`, which is in [0, 1). The next message makes it anew."""
        connections = [
            (listener, identity)
            for listener in self.listeners.values()
            for identity, client in listener.clients.items()
            if not client.process.stopped
        ]
        if connections:
            listener, identity = connections[int(share * len(connections))]
            client = listener.clients.pop(identity)
            self.broken.add(client.process)
            client.identity = f"c{next(self.numbers)}".encode()
            kernel().tell("the connection of {} to {} breaks", client.process.name, listener.process.name)


_networks: list[Network] = []


def begin_network(loss: float, repetition: float, delay: float) -> Network:
    """Makes a network, which is the one of the run from now on."""
    _networks[:] = [Network(loss, repetition, delay)]
    return _networks[0]


def network() -> Network:
    return _networks[0]


class Again(real_zmq.Again):
    """As ZMQ's, which asks the library for its last error."""

    def __init__(self) -> None:
        self.errno = real_zmq.EAGAIN


class _Frame:
    """A part of a message, with what ZMQ knows of its sender."""

    def __init__(self, content: bytes) -> None:
        self.bytes = content

    def get(self, _: str) -> str:
        return "127.0.0.1"


class Socket:
    """A socket of kind PAIR, DEALER, ROUTER or REP. Nothing ever comes to the last: all clients are admitted."""

    def __init__(self, context: "Context", kind: int) -> None:
        self._context = context
        self._kind = kind
        self.inbox: deque[Any] = deque()
        self.waiter: Task | None = None
        self.is_closed = False
        self.process = kernel().this_process
        self.process.on_death.append(self.close)
        self._endpoint = ""
        self._peer: Socket | None = None
        self.identity = b""
        # Of a ROUTER: the DEALERs that are connected.
        self.clients: dict[bytes, Socket] = {}
        # When the last message to each socket arrives: connections keep the order.
        self._last: dict[Socket | None, float] = {}

    def setsockopt(self, *_: Any) -> None: ...

    def get_monitor_socket(self, *_: Any) -> "Socket":
        """Returns a socket that tells of no failed handshake: all have one secret."""
        return Socket(self._context, real_zmq.PAIR)

    def disable_monitor(self) -> None: ...

    def getsockopt(self, option: int) -> Any:
        return self._endpoint.encode() if option == real_zmq.LAST_ENDPOINT else 0

    def bind(self, endpoint: str) -> None:
        if endpoint.startswith("inproc://"):
            network().in_process[id(self._context), endpoint] = self
            return
        host, _, port = endpoint.rpartition(":")
        endpoint = f"{host}:{port if port != '0' else network().new_port()}"
        if endpoint in network().listeners:
            raise real_zmq.ZMQError(real_zmq.EADDRINUSE)
        network().listeners[endpoint] = self
        self._endpoint = endpoint

    def connect(self, endpoint: str) -> None:
        if endpoint.startswith("inproc://"):
            self._peer = network().in_process[id(self._context), endpoint]
            return
        self._endpoint, self.identity = endpoint, f"c{next(network().numbers)}".encode()

    def put(self, message: Any) -> None:
        if self.is_closed:
            return
        self.inbox.append(message)
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            kernel().wake(waiter)

    def send(self, content: bytes, flags: int = 0) -> None:
        if self._peer is not None:
            self._peer.put(content)
        else:
            self._transmit(None, content)

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        identity, content = frames
        client = self.clients.get(identity)
        if client is None or client.is_closed:
            raise real_zmq.ZMQError(real_zmq.EHOSTUNREACH)
        self._transmit(client, content)

    def _transmit(self, client: "Socket | None", content: bytes) -> None:
        """Sends to `client`, or to where this DEALER is connected."""
        link = f"{self.process.name} to {client.process.name if client else self._endpoint}"
        for delay_s in network().deliveries(link):
            when = max(self._last.get(client, 0.0) + 1e-6, kernel().now + delay_s)
            self._last[client] = when
            self._arrive_at(when, client, content)

    def _arrive_at(self, when: float, client: "Socket | None", content: bytes) -> None:
        kernel().at(when - kernel().now, self._arrive, client, content, when + _RECONNECTS_S)

    def _arrive(self, client: "Socket | None", content: bytes, give_up_at: float) -> None:
        peer = client or network().listeners.get(self._endpoint)
        if self.is_closed:
            return
        if peer is None or peer.is_closed:
            if client is None and kernel().now < give_up_at:
                kernel().at(_RECONNECT_EVERY_S, self._arrive, client, content, give_up_at)
            return
        if (healed := network().cut_off_until(self.process, peer.process)) > kernel().now:
            kernel().at(healed - kernel().now, self._arrive, client, content, give_up_at)
            return
        if client is not None:
            client.put([content])
            return
        peer.clients[self.identity] = self
        peer.put([self.identity, content])

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        if not self.inbox:
            raise Again
        if copy:
            return self.inbox.popleft()
        return _Frame(self.inbox[0].pop(0))  # a ROUTER: the rest of the message follows

    def recv_multipart(self, flags: int = 0) -> Any:
        if not self.inbox:
            raise Again
        return self.inbox.popleft()

    def close(self, linger: int = 0) -> None:
        self.is_closed = True
        if network().listeners.get(self._endpoint) is self:
            del network().listeners[self._endpoint]


class Context:
    def __init__(self, io_threads: int = 1) -> None:
        self._sockets: list[Socket] = []

    def set(self, *_: Any) -> None: ...

    def socket(self, kind: int) -> Socket:
        self._sockets.append(Socket(self, kind))
        return self._sockets[-1]

    def destroy(self, linger: int = 0) -> None:
        for each in self._sockets:
            each.close()


class Poller:
    def __init__(self) -> None:
        # Socket, or what stands for a file descriptor -> how it was registered.
        self._registered: dict[Any, Any] = {}

    def register(self, socket: Any, flags: int = 0) -> None:
        self._registered[network().by_fd.get(socket, socket)] = socket

    def unregister(self, socket: Any) -> None:
        del self._registered[socket]

    def __contains__(self, socket: Any) -> bool:
        return socket in self._registered

    def poll(self, timeout_ms: int) -> list[tuple[Any, int]]:
        ready = [(name, 1) for socket, name in self._registered.items() if socket.inbox]
        if not ready and timeout_ms:
            for socket in self._registered:
                socket.waiter = kernel().current
            kernel().park(timeout_ms / 1000)
            for socket in self._registered:
                socket.waiter = None
            ready = [(name, 1) for socket, name in self._registered.items() if socket.inbox]
        return ready


class Datagrams:
    """As a Unix datagram socket: see `transport/wakeup.py`."""

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.waiter: Task | None = None
        self._timeout_s: float | None = None
        self._fd = next(network().numbers)
        network().by_fd[self._fd] = self
        self._name = ""
        kernel().this_process.on_death.append(self.close)

    def bind(self, name: str) -> None:
        if name in network().datagrams:
            raise OSError("in use")
        network().datagrams[name] = self
        self._name = name

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def fileno(self) -> int:
        return self._fd

    def put(self, content: bytes) -> None:
        self.inbox.append(content)
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            kernel().wake(waiter)

    def sendto(self, content: bytes, name: str) -> None:
        peer = network().datagrams.get(name)
        if peer is None:
            raise OSError("nobody is there")
        if len(peer.inbox) < _MOST_DATAGRAMS:
            kernel().at(0.00002, peer.put, content)

    def recv(self, size: int) -> bytes:
        if not self.inbox and self._timeout_s:
            self.waiter = kernel().current
            kernel().park(self._timeout_s)
            self.waiter = None
            if not self.inbox:
                raise TimeoutError
        if not self.inbox:
            raise BlockingIOError
        return self.inbox.popleft()

    def close(self) -> None:
        network().datagrams.pop(self._name, None)


zmq = ModuleType("zmq")
"""Stands for the module `zmq`."""
vars(zmq).update({name: value for name, value in vars(real_zmq).items() if name.isupper()})
vars(zmq).update(
    ZMQError=real_zmq.ZMQError,
    curve_public=real_zmq.curve_public,
    Again=Again,
    Context=Context,
    Poller=Poller,
    Socket=Socket,
)
