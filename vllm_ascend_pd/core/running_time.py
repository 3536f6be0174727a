# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still while the process is stopped (SIGSTOP, a debugger, a suspended machine)."""

import threading
import time

_STOPPED_S = 1.0


class RunningTime:
    """Seconds of `time.monotonic`, without those in which the process did not run. Somebody must ask often: nobody
    having asked for `_STOPPED_S` counts as having been stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._stopped_s = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            if now - self._last > _STOPPED_S:
                self._stopped_s += now - self._last
            self._last = now
            return now - self._stopped_s
