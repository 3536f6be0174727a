# SPDX-License-Identifier: Apache-2.0
"""How benchmarks print a result that has a bar, and what they need for --npu."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def need_emulated_npu(parser: argparse.ArgumentParser) -> None:
    """For --npu: makes the emulated CANN libraries' counters importable, or ends the program."""
    sys.path += [str(ROOT / "tests" / "npu"), str(ROOT / "tests" / "cann_on_host")]
    import cann_on_host

    if not cann_on_host.is_active():
        parser.error("--npu needs the emulated CANN libraries: CANN_ON_HOST=1 .venv-npu/bin/python ...")


def line(result: Any, holds: bool, as_json: bool, **more: object) -> str:
    """A dataclass with a `row()`: as an object with `more`, or as a table's row that says if its bar is missed."""
    if as_json:
        return json.dumps({**asdict(result), **more, "holds": holds})
    return str(result.row()) + ("" if holds else "   <- misses its bar")
