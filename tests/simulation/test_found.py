# SPDX-License-Identifier: Apache-2.0
"""Short lists of events that have shown a fault: they pass, and fail without the guard that mends it."""

import pytest

from simulation.processes import run


@pytest.mark.timeout(900)
def test_what_was_found() -> None:
    run("found")
