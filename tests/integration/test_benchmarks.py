# SPDX-License-Identifier: Apache-2.0
"""Benchmarks in small forms: they run as documented, and say what they measured. How fast it was is nobody's test."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.documented import REPOSITORY, documented

STREAMS = 300


def results(program: str | Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, program, *options, "--json"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_ops() -> None:
    found = results("benchmarks/ops.py", "--tokens", "128", "--ratios", "2", "--threads", "1")
    assert [each["op"] for each in found] == ["gather_slices", "interleave_heads", "split_heads"]
    assert all(each["of_copy"] > 0 for each in found)


def test_regroup() -> None:
    """Each side is checked for the right bytes before it is measured."""
    _, program = documented("docs/performance.md", "python benchmarks/regroup.py")
    *layers, gather, interleave = results(program, "--tokens", "64", "1024", "--ranks", "2", "--seconds", "0.1")
    assert [(each["ranks"], each["tokens"]) for each in layers] == [(2, 64), (2, 1024)]
    for each in layers:
        assert each["rounds"] >= 5
        assert 0 < each["ours_outside_ms"] < each["ours_ms"]
        assert 0 < each["reference_outside_ms"] < each["reference_ms"]
        assert each["gain"] > 0
    assert (gather["op"], interleave["op"]) == ("gather_slices", "interleave_heads")


def test_proxy_overhead() -> None:
    """All streams get through."""
    _, program = documented("docs/operations.md", "python benchmarks/proxy_overhead.py")
    options = ["--requests", "3", "--rate", "40", "--seconds", "1", "--streams", str(STREAMS)]
    first_token, cpu, streams = results(program, *options)
    assert first_token["measure"] == "first token"
    assert all(first_token[way] > 0 for way in ("direct_ms", "bare_ms", "floor_ms", "proxy_ms", "of_direct"))
    assert first_token["added_ms"] == first_token["proxy_ms"] - first_token["direct_ms"]
    assert (cpu["measure"], cpu["asked"], cpu["failed"]) == ("cpu", 40, 0)
    assert cpu["share"] > 0
    assert cpu["ms_per_request"] > 0
    assert cpu["of_engine"] > 0
    assert cpu["of_floor"] > 0
    # None of them gets its second token before all have had the first, or else it fails.
    assert (streams["measure"], streams["streams"], streams["failed"]) == ("streams", STREAMS, 0)


def test_scale() -> None:
    """Every request of every wave ends well on both sides, or it fails."""
    _, program = documented("docs/performance.md", "python benchmarks/scale.py")
    sizes = ["--requests", "1", "8", "--engines", "1", "3", "--at", "4", "--rounds", "1", "--layers", "3"]
    *found, known = results(program, *sizes)
    waves = [each for each in found if each["measure"] == "wave"]
    assert [(each["requests"], each["engines"], each["spread"]) for each in waves] == [
        (1, 1, False),
        (8, 1, False),
        (4, 1, False),
        (4, 3, False),
        (4, 3, True),
    ]
    for each in waves:
        assert each["posts"] == 1
        assert each["messages"] >= 4, "a grant and a report, each with its answer"
        assert min(each[name] for name in each if name[:2] in ("p_", "d_")) > 0
    growths = [each for each in found if each["measure"] == "growth"]
    assert {(each["smaller"]["engines"], each["larger"]["engines"]) for each in growths} == {(1, 1), (1, 3)}
    assert all(each["times"] > 0 for each in growths)
    assert known["measure"] == "known engine"
    assert min(known["bytes"].values()) > 0
