# SPDX-License-Identifier: Apache-2.0
"""vLLM's and vllm-ascend's own configuration checks take the commands that `vllm-ascend-pd migrate` makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from harness.pool import long
from harness.recipes import FILES, OLDER, recipes

TESTS = Path(__file__).parents[1]
PROGRAM = Path(__file__).parent / "offline_recipe_configs.py"
WORKING = [recipe for recipe in recipes() if recipe.verdict != "refused"]


def answers(program: Path, arguments: Iterable[object], *paths: str) -> list[Any]:
    """Returns the lines of JSON that `program` prints for recipes. `paths`: of further modules."""
    command = [sys.executable, str(program), *map(str, arguments)]
    path = ":".join([*paths, str(TESTS), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[") and line[1].isdecimal()]


# By number: the layers in each of vLLM's cache groups. The first group's last one is the MTP layer.
HYBRID = {
    **{n: [17, 16, 16, 16] for n in (73, 74)},  # Qwen3.5-27B
    **{n: [16, 15, 15, 15] for n in (75, 76, 77, 78)},  # Qwen3.5-397B
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("numbers", [[73, 75], long([74, 76, 77, 78])], ids=["one of each model", "the others"])
def test_recipes_with_linear_attention_and_mtp_register_their_caches(numbers: list[int]) -> None:
    """K lies behind a padding there, and one tensor is the MTP layer's alone."""
    assert [recipe.number for recipe in WORKING if recipe.architecture.startswith("qwen3.5")] == [*HYBRID]
    [wheel] = Path(sys.prefix, "mooncake-npu").glob("0.3.13*")
    said = answers(Path(__file__).parent / "offline_hybrid_caches.py", numbers, str(wheel))
    for number, groups, alone, regions, refused in said:
        assert refused is None, f"recipe {number}: {refused}"
        assert (groups, alone, regions) == (HYBRID[number], 1, HYBRID[number][0])
    assert [number for number, *_ in said] == numbers


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", FILES)
def test_every_recipe_that_works(version: str) -> None:
    """In one process for all of them. vllm-ascend takes caches of fp8 on chips alone that are not emulated."""
    working = [recipe for recipe in recipes(version) if recipe.verdict != "refused"]
    numbers = [recipe.number for recipe in working if recipe.data["args"].get("kv-cache-dtype") != "fp8"]
    paths = [] if version == OLDER else [str(Path(sys.prefix) / "vllm-0.30")]
    assert dict(answers(PROGRAM, [version, *numbers], *paths)) == dict.fromkeys(numbers)
