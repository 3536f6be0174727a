# SPDX-License-Identifier: Apache-2.0
"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

State = TypeVar("State")


def wait_until(condition: Callable[[], object], timeout_s: float, what: str = "") -> None:
    """Waits until a condition holds. `what`: named in the error if it never does."""
    wait_for(condition, bool, timeout_s, what=what)


def wait_for(
    look: Callable[[], State], right: Callable[[State], object], timeout_s: float, every_s: float = 0.02, what: str = ""
) -> State:
    """Returns what `look` returns, as soon as that is right."""
    deadline = time.monotonic() + timeout_s
    while not right(state := look()):
        assert time.monotonic() < deadline, f"after {timeout_s:g} s: {what or state}"
        time.sleep(every_s)
    return state
