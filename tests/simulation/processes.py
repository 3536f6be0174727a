# SPDX-License-Identifier: Apache-2.0
"""Starts the simulation in a process of its own: it changes the product's modules, and needs a fixed hash seed."""

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]


def run(*arguments: str, vllm: Path | None = None) -> str:
    """Runs a command of `__main__.py`. Returns what it prints, and raises AssertionError if it fails.

    `vllm`: the folder of another vLLM than the installed one.
    """
    path = os.pathsep.join(map(str, filter(None, [vllm, _TESTS.parent, _TESTS, os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        [sys.executable, "-m", "simulation", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-20_000:]}\n{done.stderr[-4000:]}"
    return done.stdout
