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
"""How often threads look at deadlines, of everything that is open: with every message, each would cost more the more
is."""

# A host that has died is noticed after 10 + 4 * 5 s of silence. The kernel answers for a process that is stopped, which
# is why these are not ZMQ's heartbeats: a connection that is closed means that its process has ended.
_KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 10, zmq.TCP_KEEPALIVE_INTVL: 5, zmq.TCP_KEEPALIVE_CNT: 4}

# A socket per peer: 1,023, ZMQ's own bound, are 60 decode engines of 16 ranks.
_MAX_SOCKETS = 32 * 1024


class Loop:
    """A thread that owns ZMQ sockets, with a mailbox through which other threads wake it."""

    def __init__(self, name: str, tick: Callable[[float], None]) -> None:
        self._tick = tick
        self._context = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
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
        self._tick_at = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        for option, value in _KEEPALIVE.items():
            socket.setsockopt(option, value)
        return socket

    def call(self, action: Callable[[], None]) -> bool:
        """Runs `action` on the thread, soon. False after close: then it never runs."""
        with self._mailbox_lock:
            if self._closing.is_set():
                return False
            # The thread looks here before it sleeps, and takes all there is once it has begun to.
            looks = bool(self._mailbox) or threading.get_ident() == self._thread.ident
            self._mailbox.append(action)
            if not looks:
                self._wake()
            return True

    def tick_within(self, seconds: float) -> None:
        """The next tick comes no later than that. On the thread only."""
        self._tick_at = min(self._tick_at, time.monotonic() + seconds)

    def _wake(self) -> None:
        with contextlib.suppress(zmq.Again):  # then unread wake-ups are waiting already
            self._mailbox_in.send(b"", zmq.DONTWAIT)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._turn()
                except Exception:
                    # A defect in a callback must not silence the whole channel: deadlines still have to pass.
                    logger.exception("side channel: a callback failed")
            while self._mailbox:
                self._mailbox.popleft()()
            self._on_close()
        finally:
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        with self._mailbox_lock:  # who has seen something in it has put what it brings, too
            is_empty = not self._mailbox
        sleep_ms = 1 + int(1000 * max(0.0, self._tick_at - time.monotonic())) if is_empty else 0
        ready = dict(self._poller.poll(sleep_ms))
        if self._mailbox_out in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._mailbox_out.recv(zmq.DONTWAIT)
        while self._mailbox:
            self._mailbox.popleft()()
        self._on_ready(ready)
        if (now := time.monotonic()) >= self._tick_at:
            self._tick_at = now + TICK_S
            self._on_tick(now)

    def _on_ready(self, ready: dict["zmq.Socket[bytes]", int]) -> None:
        raise NotImplementedError

    def _on_tick(self, now: float) -> None:
        self._tick(now)

    def _on_close(self) -> None:
        """The thread is about to end."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and closes all sockets. Safe to call twice."""
        with self._mailbox_lock:
            if self._closing.is_set():
                return
            self._wake()
            self._closing.set()
        if self._thread.ident is None:  # it never began
            self._context.destroy(linger=0)
            return
        # By the thread, as libzmq may wait for ever: for one of its own, where a connection broke that was full.
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("side channel: thread %s did not end within %g s", self._thread.name, timeout_s)
