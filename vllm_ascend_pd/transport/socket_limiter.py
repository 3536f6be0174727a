# SPDX-License-Identifier: Apache-2.0
"""Bounds what strangers can take from a listening ZMQ socket: open files, and memory.

libzmq accepts connections until the process has no file descriptor left, and bounds queued messages by number: a
message of endless parts is kept in memory whole. So the owner's thread follows the socket's connections here, through
its monitor, and cuts those that are too many or hold too much. libzmq waits where its events are not read: `turn`
must be called often, and what a flood makes it read in one turn bounds the flood.
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
_FILES_PER_CONNECTION = 4  # that the process may open, which others need too

FILES_WANTED = _FILES_PER_CONNECTION * _MAX_CONNECTIONS
"""With at least so many files that the process may open, a listener takes all connections it can take by default."""

# How often connections are looked at, and what one may have sent since its last whole message, in messages.
_LOOK_S = 0.1
_MESSAGES_HELD = 4
# Read in one turn.
_EVENTS = 4096
_TCP_INFO_BYTES = 136
_TCP_INFO_RECEIVED = 128  # offset of `tcpi_bytes_received`, Linux 4.1 and later


def default_limit() -> int:
    """Connections a listener takes in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_for(None if soft == resource.RLIM_INFINITY else soft)


def connections_for(files: int | None) -> int:
    """Connections a listener takes where the process may open so many `files`; None: any number."""
    return _MAX_CONNECTIONS if files is None else max(1, min(_MAX_CONNECTIONS, files // _FILES_PER_CONNECTION))


@dataclass
class _Connection:
    spoke: bool = False  # has ever sent a message that could be read
    delivered: bool = True  # a message of it was taken since the last look
    seen: int = 0  # bytes that libzmq had read of it by then
    suspect: bool = False  # was found to hold too much at the last look
    cut: bool = False


class SocketLimiter:
    """Beyond `limit` connections the oldest that never sent a readable message is cut, so that a flood does not keep
    others out. `refused` counts connections that ended without such a message, or were cut."""

    def __init__(self, listener: "zmq.Socket[bytes]", limit: int, max_message_bytes: int) -> None:
        self.refused = 0
        self._limit = limit
        self._max_held = _MESSAGES_HELD * max_message_bytes
        self._open: dict[int, _Connection] = {}
        self._silent: dict[int, None] = {}  # those that never spoke, oldest first
        self._live = 0  # open and not cut
        self._look_at = 0.0
        endpoint = listener.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        self._monitor = listener.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED
        )
        # A descriptor of our own to cut with, which is there even when the process has no other left.
        self._nothing = os.open(os.devnull, os.O_RDWR)
        self._hand = os.dup(self._nothing)

    def delivered(self, fd: int, readable: bool) -> None:
        """A whole message came from the connection with descriptor `fd` (ZMQ_SRCFD)."""
        connection = self._open.get(fd)
        if connection is not None:
            connection.delivered = True
            if readable and not connection.spoke:
                connection.spoke = True
                self._silent.pop(fd, None)

    def turn(self, now: float) -> None:
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
        """Nothing is followed any more."""
        os.close(self._hand)
        os.close(self._nothing)

    def _look(self) -> None:
        """Cuts who has sent more than messages can be since the last one was whole. Two looks in a row: what libzmq
        had read at the first, the owner has taken by the second."""
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
        """libzmq finds the connection at its end and closes it."""
        self._open[fd].cut = True
        self._silent.pop(fd, None)
        self._live -= 1
        with contextlib.suppress(OSError):  # closed meanwhile
            connection = socket.socket(fileno=os.dup2(fd, self._hand))
            try:
                # The number may be another file's by now; another connection of this port merely reconnects.
                if connection.getsockname()[1] == self._port:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
        os.dup2(self._nothing, self._hand)


def _bytes_read(fd: int) -> int:
    """What has been read from a TCP connection in all. Raises OSError if `fd` is none."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    finally:
        connection.detach()
    waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0]
    return int(struct.unpack_from("Q", info, _TCP_INFO_RECEIVED)[0]) - int(waiting)
