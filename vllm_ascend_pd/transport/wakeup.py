# SPDX-License-Identifier: Apache-2.0
"""How ranks wake decode's scheduler, which sleeps between two steps: by an empty datagram on its host.

It is only a hint. Without it, as from ranks on other hosts or in other network namespaces, the scheduler sleeps to the
end. One too many, which any process on the host could send, wakes it early.
"""

import contextlib
import secrets
import socket

# Datagrams that `silence` drops at most. The kernel keeps fewer (net.unix.max_dgram_qlen).
_MOST_UNHEARD = 1024


class WakeupSocket:
    """The scheduler's end."""

    def __init__(self) -> None:
        """Raises OSError where there are no abstract sockets."""
        # What ranks send to: a name in Linux's abstract namespace, which leaves no file.
        self.address = f"vllm-ascend-pd-{secrets.token_hex(16)}"
        self._socket = _datagrams()
        try:
            self._socket.bind(f"\0{self.address}")
        except BaseException:
            self._socket.close()
            raise

    def wait(self, timeout_s: float) -> None:
        """Blocks until a rank rings, or has rung since `silence`, for `timeout_s` at most."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError, BlockingIOError):  # the latter for 0
            self._socket.recv(1)

    def silence(self) -> None:
        """Drops earlier wake-ups."""
        self._socket.settimeout(0.0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_UNHEARD):
                self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()


class WakeupSender:
    """A rank's end."""

    def __init__(self) -> None:
        self._socket = _datagrams()
        self._socket.settimeout(0.0)

    def ring(self, address: str) -> None:
        """Wakes the scheduler at `address`. Never blocks or raises."""
        with contextlib.suppress(OSError):  # nobody is there, or enough wake-ups wait already
            self._socket.sendto(b"", f"\0{address}")

    def close(self) -> None:
        self._socket.close()


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
