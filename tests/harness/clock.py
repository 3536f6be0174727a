# SPDX-License-Identifier: Apache-2.0
"""A clock that a test moves itself."""

from types import ModuleType

import pytest


class Clock:
    """Seconds, in place of the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def clock_of(module: ModuleType, patch: pytest.MonkeyPatch) -> Clock:
    """What `module` takes for the time from now on."""
    clock = Clock()
    patch.setattr(module, "time", clock)
    return clock
