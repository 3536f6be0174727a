# SPDX-License-Identifier: Apache-2.0
"""A failing seed becomes a short history in words."""

import pytest

from simulation.processes import run

MUTANT = "a layer that was not written counts as written"


@pytest.mark.timeout(900)
def test_a_failing_seed_becomes_a_few_events() -> None:
    said = run("shrink", "2", f"--mutant={MUTANT}")
    assert "R1: " in said
    [before, after] = [int(word) for word in said.splitlines()[-1].split() if word.isdigit()][:2]
    assert after < before
    assert after <= 3
    assert said.count("    Event(") == after
    assert " asks: " in said
