# SPDX-License-Identifier: Apache-2.0
"""How ranks wake decode's scheduler, which sleeps between two steps: by an empty datagram on its host.

Only a hint. One that is lost, as from ranks on other hosts or in other network namespaces, lets the scheduler sleep to
the end; one too many, which anybody on the host could send, wakes it early.
"""

import contextlib
import secrets
import socket

# Forgotten at a time: the kernel keeps fewer (net.unix.max_dgram_qlen), unless somebody rings on and on.
_MOST_UNHEARD = 1024


class WakeupSocket:
    """The scheduler's end. `address`: what ranks ring at, a name in Linux's abstract namespace: it leaves no file."""

    def __init__(self) -> None:
        """Raises OSError where there are no abstract sockets."""
        self.address = f"vllm-ascend-pd-{secrets.token_hex(16)}"
        self._socket = _datagrams()
        try:
            self._socket.bind(f"\0{self.address}")
        except BaseException:
            self._socket.close()
            raise

    def wait(self, timeout_s: float) -> None:
        """Until it rings, or has rung since it was silenced; at most `timeout_s`."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError, BlockingIOError):  # the latter for 0
            self._socket.recv(1)

    def silence(self) -> None:
        """Forgets that it has rung."""
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
        with contextlib.suppress(OSError):  # see above; or it has rung so often that one more is of no use
            self._socket.sendto(b"", f"\0{address}")

    def close(self) -> None:
        self._socket.close()


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
