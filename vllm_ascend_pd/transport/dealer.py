# SPDX-License-Identifier: Apache-2.0
"""A side channel client's connection to one server, which connects again where libzmq does not."""

import itertools
import time
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
_PAUSE_S = 1.0
"""Between two tries of all secrets. A failed handshake costs the server about as much as one that succeeds."""
_numbers = itertools.count()


class Dealer:
    """A DEALER socket. The client's thread owns it.

    libzmq does not connect again after a CURVE handshake has failed. Then `replaced` returns a new connection. With two
    secrets, that one uses the other secret.
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
        # Where libzmq tells of handshakes that have failed. None without a secret.
        self._monitor: zmq.Socket[bytes] | None = None
        self._failed = False
        # Not before this time, in seconds of `time.monotonic`, are all secrets tried again.
        self._again_at = time.monotonic() + _PAUSE_S
        try:
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_DESCRIPTION_BYTES)
            self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            self.socket.setsockopt(zmq.RCVHWM, UNREAD_ANSWERS)
            if "[" in endpoint:
                self.socket.setsockopt(zmq.IPV6, 1)
            if keys:
                keys[which].protect_client(self.socket)
            if keys:
                self._monitor = self.socket.get_monitor_socket(_FAILURES, f"inproc://monitor-{next(_numbers)}")
            self.socket.connect(endpoint)
        except Exception:
            self.close()
            raise

    def is_due(self, now: float) -> bool:
        """Returns whether its handshake has failed and it is time to replace it. `now`: of `time.monotonic`."""
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
            except zmq.Again:
                break
            self._failed |= bool(event & _FAILURES)
        untried = self._which + 1 < len(self._keys)
        return self._failed and (untried or now >= self._again_at)

    def replaced(self) -> "Dealer":
        """Closes this connection, and returns one with the next secret. Raises what ZMQ raises."""
        self.close()
        which = (self._which + 1) % len(self._keys)
        return Dealer(self._make_socket, self.endpoint, self._keys, which)

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: how long the context's end may wait until the server has what was sent."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger_ms)
