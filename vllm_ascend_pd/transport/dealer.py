# SPDX-License-Identifier: Apache-2.0
"""A side channel client's connection to one server, which finds out which of two secrets the server has in use."""

import itertools
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_ascend_pd.core.protocol import MAX_DESCRIPTION_BYTES
from vllm_ascend_pd.transport.curve import Keys

UNREAD_ANSWERS = 32
"""Received messages that wait to be taken. Times their size, this is what a server can make us keep."""

# Requests that a server has not taken yet.
_HIGH_WATER_MARK = 4096
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # a server that has another secret in use ends the connection
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_numbers = itertools.count()


class Dealer:
    """A DEALER socket. The client's thread owns it.

    With two secrets, it begins with the first one. When its handshake has failed, `replaced` returns a connection with
    the other one.
    """

    def __init__(
        self,
        make_socket: Callable[[int], "zmq.Socket[bytes]"],
        endpoint: str,
        keys: Sequence[Keys],
        which: int = 0,
    ) -> None:
        """Connects.

        `keys`: of each of the cluster's secrets. Empty: no encryption.
        `which`: the index of the keys to use.

        Raises what ZMQ raises.
        """
        self.endpoint = endpoint
        self._make_socket, self._keys, self._which = make_socket, keys, which
        self.socket = make_socket(zmq.DEALER)
        # Where libzmq tells of handshakes that have failed. None unless there are two secrets.
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_DESCRIPTION_BYTES)
            self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            self.socket.setsockopt(zmq.RCVHWM, UNREAD_ANSWERS)
            if "[" in endpoint:
                self.socket.setsockopt(zmq.IPV6, 1)
            if keys:
                keys[which].protect_client(self.socket)
            if len(keys) > 1:
                self._monitor = self.socket.get_monitor_socket(_FAILURES, f"inproc://monitor-{next(_numbers)}")
            self.socket.connect(endpoint)
        except Exception:
            self.close()
            raise

    def has_failed(self) -> bool:
        """Returns whether a handshake has failed since the last call. Only with two secrets is this known."""
        failed = False
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
            except zmq.Again:
                break
            failed |= bool(event & _FAILURES)
        return failed

    def replaced(self) -> "Dealer":
        """Closes this connection, and returns one with the other secret. Raises what ZMQ raises."""
        self.close()
        which = (self._which + 1) % len(self._keys)
        return Dealer(self._make_socket, self.endpoint, self._keys, which)

    def close(self) -> None:
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger=0)
