# SPDX-License-Identifier: Apache-2.0
"""What benchmarks have in common: options, how results with a bar are printed, and what they need for --npu."""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def options(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    return parser


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


def show(results: Iterable[Any], header: str, args: argparse.Namespace, ending: str = "") -> int:
    """Prints results as they come. Returns the program's exit code: 1 where --check is given and a bar is missed."""
    missed = False
    if not args.json:
        print(header)
    for result in results:
        missed |= not result.holds
        print(line(result, result.holds, args.json, load_average=os.getloadavg()[0]), flush=True)
    if ending and not args.json:
        print(f"load average {os.getloadavg()[0]:.1f}, {ending}")
    return 1 if missed and args.check else 0
