# SPDX-License-Identifier: Apache-2.0
"""A clock that a test moves itself."""

from types import ModuleType

import pytest


class Clock:
    """Replaces the module `time`. It counts seconds that a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def clock_of(module: ModuleType, patch: pytest.MonkeyPatch) -> Clock:
    """Makes `module` use a `Clock` from now on."""
    clock = Clock()
    patch.setattr(module, "time", clock)
    return clock
