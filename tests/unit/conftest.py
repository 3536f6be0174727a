# SPDX-License-Identifier: Apache-2.0
"""Hypothesis draws the same examples in every run, however slow the machine is: no failure is the day's."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "same every run", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same every run")


@pytest.fixture
def anyio_backend() -> str:
    """Of the tests that are coroutines: the proxy's event loop."""
    return "asyncio"
