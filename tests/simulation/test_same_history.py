# SPDX-License-Identifier: Apache-2.0
"""A seed decides everything: two processes have equal histories."""

import pytest

from simulation.processes import run, run_apart

SEEDS = 20


@pytest.mark.timeout(900)
def test_two_processes_have_the_same_histories() -> None:
    command = ["seeds", f"0-{SEEDS}", "--digests", "--go-on", "requests=12"]
    histories = [run(*command), run_apart(*command)]
    digests = [[line for line in history.splitlines() if line[:1].isdigit()][:SEEDS] for history in histories]
    assert len(set(digests[0])) == SEEDS
    assert digests[0] == digests[1]


def test_the_product_has_no_real_clock_left() -> None:
    assert run("real-ones-left") == ""
