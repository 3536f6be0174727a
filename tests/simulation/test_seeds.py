# SPDX-License-Identifier: Apache-2.0
"""Seeds without a violation: 10,000 requests with fixed ones. `scripts/test.sh --simulation` goes on."""

import os
import sys
from pathlib import Path

import pytest

from simulation.processes import run, run_apart

REQUESTS = 10_000


@pytest.mark.timeout(900)
def test_seeds() -> None:
    run("seeds", "0-", f"--requests={REQUESTS}")


@pytest.mark.timeout(900)
def test_each_request_has_its_answer_if_nothing_goes_wrong() -> None:
    """Otherwise a shape in which nothing is ever sent would violate no rule."""
    run("seeds", "0-30", "calm=True")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["0.23", "0.32", "0.33"])
def test_seeds_with_another_vllm(version: str) -> None:
    run_apart("seeds", "0-", "--requests=150", vllm=Path(sys.prefix) / f"vllm-{version}")


@pytest.mark.long
@pytest.mark.timeout(0)
def test_seeds_of_today() -> None:
    """Environment variables: SIMULATION_SEED, the first seed, and SIMULATION_SECONDS, the time on one core."""
    first, seconds = os.environ["SIMULATION_SEED"], os.environ.get("SIMULATION_SECONDS", "1800")
    run("seeds", f"{first}-", f"--seconds={seconds}")
