# SPDX-License-Identifier: Apache-2.0
"""Benchmarks in small forms: they run, and say what they measured. How fast it was is nobody's test."""

import json
import subprocess
import sys
from typing import Any

from harness.documented import REPOSITORY


def results(name: str, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, REPOSITORY / "benchmarks" / name, *options, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_ops() -> None:
    found = results("ops.py", "--tokens", "128", "--ratios", "2", "--threads", "1")
    assert [each["op"] for each in found] == ["gather_slices", "interleave_heads", "split_heads"]
    assert all(each["of_copy"] > 0 for each in found)


def test_regroup() -> None:
    """Each side is checked for the right bytes before it is measured."""
    *layers, gather, interleave = results("regroup.py", "--tokens", "64", "1024", "--ranks", "2", "--seconds", "0.1")
    assert [(each["ranks"], each["tokens"]) for each in layers] == [(2, 64), (2, 1024)]
    for each in layers:
        assert each["rounds"] >= 5
        assert 0 < each["ours_outside_ms"] < each["ours_ms"]
        assert 0 < each["reference_outside_ms"] < each["reference_ms"]
        assert each["gain"] > 0
    assert (gather["op"], interleave["op"]) == ("gather_slices", "interleave_heads")
