# SPDX-License-Identifier: Apache-2.0
"""Limits the files and the memory that strangers can take through a listening ZMQ socket.

libzmq accepts connections until the process has no file descriptor left. It bounds queued messages by number, and keeps
a message of endless parts in memory as a whole. So `SocketLimiter` follows the socket's connections through its
monitor, and closes those that are too many or hold too much. libzmq blocks while monitor events are not read, so
`turn` must be called often. How many events one turn reads limits a flood of connections.
"""

import contextlib
import fcntl
import os
import resource
import socket
import struct
import termios
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

_MAX_CONNECTIONS = 4096
# Files that the process must be able to open per connection. The rest is for other uses.
_FILES_PER_CONNECTION = 4

FILES_WANTED = _FILES_PER_CONNECTION * _MAX_CONNECTIONS
"""If the process may open so many files, a listener takes the largest number of connections."""

# Seconds between two looks at what connections hold.
_LOOK_S = 0.1
# What a connection may send between two whole messages, in messages of the longest kind.
_MESSAGES_HELD = 4
# Monitor events that are read in one turn.
_EVENTS = 4096
_TCP_INFO_BYTES = 136
# Offset of `tcpi_bytes_received`, Linux 4.1 and later.
_TCP_INFO_RECEIVED = 128


def default_limit() -> int:
    """Returns how many connections a listener takes in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_for(None if soft == resource.RLIM_INFINITY else soft)


def connections_for(files: int | None) -> int:
    """Returns how many connections a listener takes if the process may open `files` files; None: any number."""
    return _MAX_CONNECTIONS if files is None else max(1, min(_MAX_CONNECTIONS, files // _FILES_PER_CONNECTION))


@dataclass
class _Connection:
    # Whether it has ever sent a readable message.
    spoke: bool = False
    # Whether a message of it was taken since the last look.
    delivered: bool = True
    # Bytes that libzmq had read of it at the last look.
    seen: int = 0
    # Whether it held too much at the last look.
    suspect: bool = False
    # Whether it was closed here.
    cut: bool = False


class SocketLimiter:
    """Follows the connections of one listening socket. The thread that owns the socket calls all methods.

    Beyond the limit it closes the oldest connection that never sent a readable message, so a flood keeps no peer out.
    """

    def __init__(self, listener: "zmq.Socket[bytes]", limit: int, max_message_bytes: int) -> None:
        # Connections that ended without a readable message, or were closed here.
        self.refused = 0
        self._limit = limit
        self._max_held = _MESSAGES_HELD * max_message_bytes
        # By file descriptor.
        self._open: dict[int, _Connection] = {}
        # Those of `_open` that never spoke, the oldest first.
        self._silent: dict[int, None] = {}
        # How many of `_open` are not cut.
        self._live = 0
        # When to look at what connections hold.
        self._look_at = 0.0
        endpoint = listener.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        self._monitor = listener.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED
        )
        # A file descriptor to close connections with. It is reserved, since the process may have no other left.
        self._nothing = os.open(os.devnull, os.O_RDWR)
        self._hand = os.dup(self._nothing)

    def delivered(self, fd: int, readable: bool) -> None:
        """Records that a whole message came from file descriptor `fd` (ZMQ_SRCFD)."""
        connection = self._open.get(fd)
        if connection is not None:
            connection.delivered = True
            if readable and not connection.spoke:
                connection.spoke = True
                self._silent.pop(fd, None)

    def turn(self, now: float) -> None:
        """Reads what has happened to connections, and closes those beyond the limits. Call it often."""
        for _ in range(_EVENTS):
            try:
                message = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            event = parse_monitor_message(message)
            kind, fd = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._open[fd] = _Connection()
                self._silent[fd] = None
                self._live += 1
                if self._live > self._limit:
                    self._cut(next(iter(self._silent), fd))
            elif kind == zmq.EVENT_DISCONNECTED and fd in self._open:
                connection = self._open.pop(fd)
                self._silent.pop(fd, None)
                self._live -= not connection.cut
                self.refused += connection.cut or not connection.spoke
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look()

    def close(self) -> None:
        """Stops following connections."""
        os.close(self._hand)
        os.close(self._nothing)

    def _look(self) -> None:
        """Closes connections that have sent more since their last whole message than messages may hold.

        A connection must be over the limit at two looks in a row, so that the owner can take what libzmq had read at
        the first one.
        """
        for fd, connection in list(self._open.items()):
            if connection.cut:
                continue
            with contextlib.suppress(OSError):  # closed meanwhile: the event follows
                read = _bytes_read(fd)
                if connection.delivered:
                    connection.delivered, connection.suspect, connection.seen = False, False, read
                elif read - connection.seen > self._max_held:
                    if connection.suspect:
                        self._cut(fd)
                    connection.suspect = True

    def _cut(self, fd: int) -> None:
        """Shuts a connection down. libzmq sees its end and closes it."""
        self._open[fd].cut = True
        self._silent.pop(fd, None)
        self._live -= 1
        with contextlib.suppress(OSError):  # closed meanwhile
            connection = socket.socket(fileno=os.dup2(fd, self._hand))
            try:
                # The number may belong to another file by now. Another connection of this port merely reconnects.
                if connection.getsockname()[1] == self._port:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
        os.dup2(self._nothing, self._hand)


def _bytes_read(fd: int) -> int:
    """Returns how many bytes have ever been read from a TCP connection. Raises OSError if `fd` is not one."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    finally:
        connection.detach()
    waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    return int(struct.unpack_from("Q", info, _TCP_INFO_RECEIVED)[0]) - int(waiting)
