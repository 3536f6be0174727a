# SPDX-License-Identifier: Apache-2.0
"""vLLM's and vllm-ascend's own configuration checks take the commands that `vllm-ascend-pd migrate` makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from harness.recipes import recipes

TESTS = Path(__file__).parents[1]
PROGRAM = Path(__file__).parent / "offline_recipe_configs.py"
WORKING = [recipe for recipe in recipes() if recipe.verdict != "refused"]


def refusals(numbers: Iterable[int]) -> dict[int, str | None]:
    """Returns why each recipe's new command is refused, in one process for all of them."""
    command = [sys.executable, str(PROGRAM), *map(str, numbers)]
    path = f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[") and line[1].isdecimal())


def test_decode_and_prefill_of_one_architecture() -> None:
    """A sample. Each further architecture takes seconds of imports."""
    numbers = [recipe.number for recipe in WORKING if recipe.architecture == "deepseek-v3"]
    assert refusals(numbers) == dict.fromkeys(numbers)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_recipe_that_works() -> None:
    numbers = [recipe.number for recipe in WORKING]
    assert refusals(numbers) == dict.fromkeys(numbers)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_configurations_that_vllm_refuses_are_noticed() -> None:
    """Two guides' own commands do not start: `migrate` changes them."""
    why = refusals([-74, -63])
    assert "Non-MoE models do not support external data parallel mode" in str(why[74])
    assert "must be greater than or equal to max_num_seqs" in str(why[63])
