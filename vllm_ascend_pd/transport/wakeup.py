# SPDX-License-Identifier: Apache-2.0
"""How a scheduler and its ranks wake each other: by an empty datagram.

Ranks wake decode's scheduler, which sleeps between two steps. Prefill's scheduler wakes its ranks, which wait in a step
that computes nothing.

A wakeup is only a hint. If it is missing, the other sleeps to the end: processes on other hosts or in other network
namespaces cannot send it. One too many wakes it early: any process on the host can send it.
"""

import contextlib
import secrets
import socket

# How many datagrams `clear` drops at most. The kernel keeps fewer (net.unix.max_dgram_qlen).
_MAX_PENDING_WAKEUPS = 1024


def new_address() -> str:
    """Returns an address that nobody guesses: a name in Linux's abstract namespace, which leaves no file."""
    return f"vllm-ascend-pd-{secrets.token_hex(16)}"


class WakeupSocket:
    """The end of whoever is woken, used by one thread."""

    def __init__(self, address: str | None = None) -> None:
        """`address`: a new one if None. Raises OSError if the system has no abstract sockets, or the address is
        taken."""
        self.address = address or new_address()
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

    def fileno(self) -> int:
        return self._socket.fileno()

    def clear(self) -> None:
        """Drops earlier wake-ups."""
        self._socket.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MAX_PENDING_WAKEUPS):
                self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()


class WakeupSender:
    """The end of whoever wakes others."""

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
