# SPDX-License-Identifier: Apache-2.0
"""The guards that `scripts/test.sh --mutants` takes out are where mutants.py says."""

from pathlib import Path

import pytest

from simulation.mutants import MUTANTS, Edit, quick_tests

TESTS = Path(__file__).parents[1]


def test_a_mutant_fails_loudly_when_its_source_has_changed() -> None:
    edit = Edit("core.text:is_name", "no such line", "")
    with pytest.raises(ValueError, match="has 0 times 'no such line'"), edit.made():
        pass


def test_each_mutant_can_be_made_and_has_quick_tests() -> None:
    for mutant in MUTANTS.values():
        with mutant.made():
            pass
        assert all((TESTS / each).is_file() for each in quick_tests(mutant))
