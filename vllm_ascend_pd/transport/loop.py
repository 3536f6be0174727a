# SPDX-License-Identifier: Apache-2.0
"""A thread that owns ZMQ sockets, with a mailbox through which other threads wake it."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)

TICK_S = 0.05
"""Seconds between two looks at deadlines. A look costs more the more is open, so not every message causes one."""

# An idle connection to a dead host ends after 10 + 4 * 5 s. While something that was sent is not acknowledged, Linux
# does not probe: the connection ends when `net.ipv4.tcp_retries2` is used up, after about 15 minutes by default.
# TCP_USER_TIMEOUT would shorten this, but also end connections to stopped processes whose buffers are full (R2).
# ZMQ's heartbeats would end all connections to these. The kernel answers for a stopped process, so a closed connection
# means that its process has ended.
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 4}

# One socket per peer. ZMQ's default, 1,023, is enough for only 60 decode engines of 16 ranks.
_MAX_SOCKETS = 32 * 1024


class Loop:
    """A thread that owns ZMQ sockets, with a mailbox through which other threads wake it."""

    def __init__(self, name: str, tick: Callable[[float], None]) -> None:
        """`tick(now)` runs on the thread every `TICK_S`. A subclass starts the thread at the end of its constructor."""
        self._tick = tick
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._poller = zmq.Poller()
        # Actions of other threads. Changes under `_mailbox_lock`, but the thread takes from it without.
        self._mailbox: deque[Callable[[], None]] = deque()
        self._mailbox_in = self._socket(zmq.PAIR)
        self._mailbox_out = self._socket(zmq.PAIR)
        self._mailbox_lock = threading.Lock()
        address = f"inproc://mailbox-{id(self)}"
        self._mailbox_out.bind(address)
        self._mailbox_in.connect(address)
        self._poller.register(self._mailbox_out, zmq.POLLIN)
        # File descriptor -> what to do when it can be read. The thread owns it.
        self._watched: dict[int, Callable[[], None]] = {}
        self._closing = threading.Event()
        self._tick_at = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        for option, value in _KEEPALIVE.items():
            socket.setsockopt(option, value)
        return socket

    def call(self, action: Callable[[], None]) -> bool:
        """Runs `action` on the thread, soon. Any thread may call it. After `close` it returns False and does
        nothing."""
        with self._mailbox_lock:
            if self._closing.is_set():
                return False
            # A non-empty mailbox has woken the thread already. The thread itself looks before it sleeps.
            looks = bool(self._mailbox) or threading.get_ident() == self._thread.ident
            self._mailbox.append(action)
            if not looks:
                self._wake()
            return True

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        """Calls `readable` on the thread whenever `fd`, which is no ZMQ socket, can be read. Any thread may call it."""

        def register() -> None:
            self._watched[fd] = readable
            self._poller.register(fd, zmq.POLLIN)

        self.call(register)

    def tick_within(self, seconds: float) -> None:
        """Makes the next tick come within `seconds`. Only the thread calls it."""
        self._tick_at = min(self._tick_at, time.monotonic() + seconds)

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # unread wake-ups are waiting already
            self._mailbox_in.send(b"", zmq.DONTWAIT)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._call(self._turn)
        finally:
            self._end()

    def _end(self) -> None:
        """Runs what was posted before `close`, then `_on_close`, and closes all sockets."""
        self._read_mailbox()
        self._call(self._on_close)
        self._context.destroy(linger=0)

    def _call(self, action: Callable[[], None]) -> None:
        """Runs a callback. Its defect must not stop others: deadlines pass, and every request gets its answer."""
        try:
            action()
        except Exception:
            logger.exception("side channel: a callback failed")

    def _read_mailbox(self) -> None:
        while self._mailbox:
            self._call(self._mailbox.popleft())

    def _turn(self) -> None:
        with (
            self._mailbox_lock
        ):  # a thread that adds to an empty mailbox also sends a wake-up before it releases the lock
            is_empty = not self._mailbox
        sleep_ms = 1 + int(1000 * max(0.0, self._tick_at - time.monotonic())) if is_empty else 0
        ready = dict(self._poller.poll(sleep_ms))
        if self._mailbox_out in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._mailbox_out.recv(zmq.DONTWAIT)
        self._read_mailbox()
        for fd in self._watched.keys() & ready.keys():
            self._call(self._watched[fd])
        self._on_ready(ready)
        if (now := time.monotonic()) >= self._tick_at:
            self._tick_at = now + TICK_S
            self._on_tick(now)

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        """Handles what has come. `ready`: sockets that can be read."""
        raise NotImplementedError

    def _on_tick(self, now: float) -> None:
        self._tick(now)

    def _on_close(self) -> None:
        """Runs on the thread just before it ends."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and closes all sockets. A second call does nothing."""
        with self._mailbox_lock:
            if self._closing.is_set():
                return
            self._wake()
            self._closing.set()
        # The thread destroys the context. This may block for ever inside libzmq, so the join has a timeout.
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("side channel: thread %s did not end within %g s", self._thread.name, timeout_s)
