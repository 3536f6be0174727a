# SPDX-License-Identifier: Apache-2.0
"""Sides of a comparison that share the machine by taking turns."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from harness.processes import ManagedProcess

WAKE_SECONDS = 0.3
"""In which connections that have been idle for too long meanwhile are closed."""


class TakesTurns:
    """Some processes. Between their turns they are stopped (SIGSTOP), so that they cost nothing."""

    def __init__(self, processes: Sequence[ManagedProcess]) -> None:
        self.processes = processes

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        time.sleep(WAKE_SECONDS)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Before its processes are ended: stopped ones do not end in order."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.signal_group(number)
