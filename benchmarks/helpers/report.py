# SPDX-License-Identifier: Apache-2.0
"""How benchmarks print a result that has a bar, and what they need for --npu."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def need_emulated_npu(parser: argparse.ArgumentParser) -> None:
    """For --npu: makes the emulated CANN libraries' counters importable, or ends the program."""
    sys.path += [str(ROOT / "tests" / "npu"), str(ROOT / "tests" / "cann_on_host")]
    import cann_on_host

    if not cann_on_host.is_active():
        parser.error("--npu needs the emulated CANN libraries: CANN_ON_HOST=1 .venv-npu/bin/python ...")


def quartiles(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the first and the third quartile of rounds' ratios."""
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    first, _, third = statistics.quantiles(ratios, method="inclusive")
    return first, third


def line(result: Any, holds: bool, as_json: bool, **more: object) -> str:
    """Returns a dataclass with a `row()` as a JSON object with `more`, or as a table's row that says if its bar is
    missed.
    """
    if as_json:
        return json.dumps({**asdict(result), **more, "holds": holds})
    return str(result.row()) + ("" if holds else "   <- misses its bar")
