# SPDX-License-Identifier: Apache-2.0
"""Reads what a benchmark prints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.documented import REPOSITORY


def results(program: str | Path, *options: str) -> list[dict[str, Any]]:
    """Returns the objects of its `--json`."""
    command = [sys.executable, program, *options, "--json"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]
