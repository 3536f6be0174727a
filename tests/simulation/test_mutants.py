# SPDX-License-Identifier: Apache-2.0
"""The oracle notices when a guard of the product is taken out."""

import pytest

from simulation.processes import run


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_missing_guard_is_noticed() -> None:
    run("mutants", "0-60")
