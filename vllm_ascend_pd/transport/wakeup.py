# SPDX-License-Identifier: Apache-2.0
"""Lets ranks wake decode's scheduler while it sleeps between two steps, by an empty datagram.

A wakeup is only a hint. If it is missing, the scheduler sleeps to the end: ranks on other hosts or in other network
namespaces cannot send it. An extra one wakes the scheduler early: any process on the host can send it.
"""

import contextlib
import secrets
import socket

# How many datagrams `clear` drops at most. The kernel keeps fewer (net.unix.max_dgram_qlen).
_MAX_PENDING_WAKEUPS = 1024


class WakeupSocket:
    """The scheduler's end of the wakeup. Only its thread uses it."""

    def __init__(self) -> None:
        """Raises OSError if the system has no abstract sockets."""
        # The address that ranks send to: a name in Linux's abstract namespace, which leaves no file.
        self.address = f"vllm-ascend-pd-{secrets.token_hex(16)}"
        self._socket = _datagrams()
        try:
            self._socket.bind(f"\0{self.address}")
        except BaseException:
            self._socket.close()
            raise

    def wait(self, timeout_s: float) -> None:
        """Blocks until a rank wakes the scheduler, or has done so since `clear`. `timeout_s`: the longest wait."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError, BlockingIOError):  # the latter for 0
            self._socket.recv(1)

    def clear(self) -> None:
        """Drops earlier wake-ups."""
        self._socket.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_PENDING_WAKEUPS):
                self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()


class WakeupSender:
    """A rank's end of the wakeup."""

    def __init__(self) -> None:
        self._socket = _datagrams()
        self._socket.settimeout(0.0)

    def wake(self, address: str) -> None:
        """Wakes the scheduler at `address`. Never blocks or raises."""
        with contextlib.suppress(OSError):  # nobody is there, or enough wake-ups wait already
            self._socket.sendto(b"", f"\0{address}")

    def close(self) -> None:
        self._socket.close()


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
