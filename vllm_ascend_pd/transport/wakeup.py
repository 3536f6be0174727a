# SPDX-License-Identifier: Apache-2.0
"""How long a step that computes nothing waits, and how a scheduler and its ranks wake each other: by an empty datagram.

Ranks wake decode's scheduler, which sleeps between two steps, and so does its metaserver client. Prefill's ticket
listener wakes the ranks of its engine, which wait in a step that computes nothing.

A wakeup is only a hint. If it is missing, the other sleeps to the end: processes on other hosts or in other network
namespaces cannot send it. One too many wakes it early: any process on the host can send it.
"""

import contextlib
import secrets
import socket
import time

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
        """Blocks until somebody sends a wake-up, or has done so since `clear`. `timeout_s`: the longest wait."""
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
        """Wakes whoever waits at `address`. Never blocks or raises."""
        with contextlib.suppress(OSError):  # nobody is there, or enough wake-ups wait already
            self._socket.sendto(b"", f"\0{address}")

    def close(self) -> None:
        self._socket.close()


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


FIRST_S = 0.02
"""Seconds of the first wait. Short compared with the time to compute a prompt, which is what the step waits for."""

BETWEEN_S = 0.011
"""Seconds of a pause between two steps that wait. A little more than processes should poll each other for if they share
a core: 10 ms, in tests."""

PAUSE_S = 0.05
"""Seconds of the longest pause, instead of a step's wait."""


class IdleWait:
    """Decides how long each step waits. Used by the scheduler's thread alone.

    vLLM itself sleeps for 1 ms between two steps without tokens. With that alone, a decode engine of four ranks that
    only waited took two cores, all that there were. It takes 0.16 of a core with these waits.
    """

    def __init__(
        self, longest_s: float, in_flight: int, wakeup: WakeupSocket | None = None, between_s: float = BETWEEN_S
    ) -> None:
        """Creates it; no step is in flight yet.

        longest_s: the longest wait, in seconds. 0 if other engines wait for every step of this one (data-parallel MoE).
        in_flight: how many steps vLLM has in flight at most. While one of them computes, no step behind it waits: that
            would delay the next token.
        wakeup: wakes the scheduler. None: it never pauses. `close` closes it.
        between_s: the longest pause behind a step that waits. 0 if that step's rank is in the scheduler's process.
        """
        self._longest_s = longest_s
        self._in_flight = in_flight
        self._wakeup = wakeup
        self._between_s = between_s
        # Steps since one computed something.
        self._empty = in_flight - 1
        # When something last happened, in monotonic seconds.
        self._since = time.monotonic()
        # How long the next pause may be.
        self._pause_s = 0.0

    @property
    def _waits(self) -> bool:
        """Whether the last step waits."""
        return self._longest_s > 0 and self._empty >= self._in_flight and self._empty % self._in_flight == 0

    @property
    def wakeup_address(self) -> str:
        """The address that wakes the scheduler: where ranks report that a transfer has ended while no step waits for
        it. "": none."""
        return "" if self._wakeup is None else self._wakeup.address

    def pause(self, is_idle: bool) -> None:
        """Call it before each step, and collect what the scheduler is woken for afterwards.

        Sleeps until the scheduler is woken, if the last step waited, in its ranks or by this pause. `is_idle`: whether
        the step computes nothing and has no news for the ranks.
        """
        if self._wakeup is None:
            return
        if is_idle and self._waits:
            self._wakeup.wait(self._pause_s)
        self._wakeup.clear()

    def next(self, computes: bool, news: bool, waits_here: bool = False) -> float:
        """Returns how many seconds the next step waits.

        computes: whether it computes anything.
        news: whether it brings anything new to the ranks.
        waits_here: whether the scheduler expects an answer, which ranks do not hear, or has got one. Then the step does
            not wait, and the pause before the next one is as long instead.
        """
        now = time.monotonic()
        if computes or news:
            self._since = now
        self._empty = 0 if computes else self._empty + 1
        wait_s = min(self._longest_s, max(FIRST_S, now - self._since)) if self._waits else 0.0
        if waits_here and self._wakeup is not None:
            self._pause_s = min(PAUSE_S, wait_s)
            return 0.0
        self._pause_s = min(self._between_s, wait_s)
        return wait_s

    def close(self) -> None:
        """Closes the wakeup socket."""
        if self._wakeup is not None:
            self._wakeup.close()
