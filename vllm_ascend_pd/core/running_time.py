# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still while the process is stopped."""

import threading
import time

# Seconds between two calls after which the process counts as stopped.
_STOPPED_S = 1.0


class RunningTime:
    """Returns seconds of `time.monotonic`, without those in which the process was stopped. Any thread may call it.

    Call it often: if no call comes for `_STOPPED_S`, the process counts as stopped for that time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = time.monotonic()
        # Seconds that the process was stopped so far. It changes under the lock.
        self.stopped_s = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            if now - self._last > _STOPPED_S:
                self.stopped_s += now - self._last
            self._last = now
            return now - self.stopped_s
