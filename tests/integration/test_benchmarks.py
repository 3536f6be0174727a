# SPDX-License-Identifier: Apache-2.0
"""Benchmarks in small forms: they run as documented, and say what they measured. How fast it was is nobody's test."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.documented import REPOSITORY, documented

STREAMS = 300

pytestmark = pytest.mark.timeout(600)  # of which most start processes that import torch: minutes on a busy machine


def results(program: str | Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, program, *options, "--json"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_run_all_starts_every_benchmark(tmp_path: Path) -> None:
    """With a stand-in for Python. One that fails, or whose environment is missing, fails all."""
    script, quick = documented("docs/performance.md", "benchmarks/run_all.sh")
    programs = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    programs -= {"pull_proxy", "relay_floor", "stub_engine"}  # which others start

    def run(*options: str) -> tuple[int, str]:
        environment = {**os.environ, "VENV": str(tmp_path / "venv")}
        ran = subprocess.run([script, *options], cwd=REPOSITORY, capture_output=True, text=True, env=environment)
        return ran.returncode, ran.stdout

    for name in ("venv", "venv-npu"):
        status, said = run()
        assert status == 1
        assert "NOT RUN  plan" in said
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").write_text(f'#!/usr/bin/env bash\necho "$*" >>{tmp_path}/log\n')
        (tmp_path / name / "bin/python").chmod(0o755)
    (tmp_path / "log").unlink()
    status, said = run(quick)
    assert status == 0, said
    started = [Path(line.split()[0]).stem for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(started) == sorted(programs)
    (tmp_path / "venv/bin/python").write_text("#!/usr/bin/env bash\nexit 3\n")
    status, said = run()
    assert status == 1
    assert "FAILED   push" in said
    assert run("--wrong")[0] == 2


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


def test_push() -> None:
    """Each side's bytes are compared on arrival before it is measured."""
    _, program = documented("docs/performance.md", "python benchmarks/push.py")
    small = ["--mib", "2", "--layers", "2", "--heads", "1", "--rounds", "2"]
    found = results(program, *small, "--requests", "1", "8")
    cases = [(each["requests"], each["scattered"], each["descriptor_kib"]) for each in found]
    assert cases == [(1, False, 512), (1, True, 32), (8, False, 64), (8, True, 32)]
    for each in found:
        assert all(each[side] > 0 for side in ("ours", "best", "same", "tcp"))
        assert each["of_best"] == each["ours"] / each["best"]


def test_overlap() -> None:
    _, program = documented("docs/performance.md", "python benchmarks/overlap.py")
    small = ["--mib", "2", "--layers", "4", "--heads", "1", "--rounds", "2"]
    found = results(program, *small, "--compute", "2", "0.5")
    assert [(each["wanted"], each["early_bar"]) for each in found] == [(2.0, 0.5), (0.5, 0.5)]
    for each in found:
        assert 0 <= each["early"] < 1  # the last layer's bytes are never early
        assert min(each[time] for time in ("compute_ms", "push_ms", "after_ms", "bulk_after_ms")) > 0
        assert each["bulk_after_ms"] == 4 * each["push_ms"]


def test_memory() -> None:
    """The ring is what the code says, on real ranks too, and follows the step's tokens, not the cache."""
    _, program = documented("docs/performance.md", "python benchmarks/memory.py")
    real, *found = results(program)
    assert len(found) == 2 * 2 * 3
    assert real["registered"] == [real["predicted"]] * 2
    for each in found:
        assert each["ours"] == 4 * (each["step_tokens"] + 2 * 128) * 2 * 128 * each["heads"] * 2
        layers = {"Llama-3.1-70B": 80, "Qwen3-235B-A22B": 94}[each["model"]]
        assert each["cache"] - 2**26 < layers * each["reference"] <= each["cache"]
        assert each["less"] == each["reference"] / each["ours"]


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


def test_simulate() -> None:
    """The documented clusters, with less traffic. Requests get through all of it, in its order."""
    commands = [
        documented("docs/performance.md", "python benchmarks/simulate.py --loads"),
        documented("docs/performance.md", "python benchmarks/simulate.py --clusters"),
        documented("docs/performance.md", "python benchmarks/simulate.py --model"),
    ]
    for (_, program, *options), seconds in zip(commands, ("60", "30", "0.2"), strict=True):
        found = results(program, *options, "--seconds", seconds)
        assert found
        for each in found:
            assert (each["measure"], each["failed"]) == ("simulation", 0)
            assert each["requests"] > 0
            assert 0 < each["kv"]["p50"] < each["ttft"]["p50"] <= each["ttft"]["p90"] <= each["ttft"]["p99"]
            assert 0 < each["early"] < 1
            for use in ("prefill_busy", "decode_busy", "p_link", "d_link"):
                assert 0 < each[use]["mean"] <= each[use]["busiest"] <= 1
            assert each["advice"]["full_first"] in ("prefill", "decode")


def test_simulate_validation() -> None:
    """Real workers have moved all requests' KV; how near the simulator is depends on who else uses the machine."""
    _, program, *options = documented("docs/performance.md", "python benchmarks/simulate.py --validate")
    *alone, one, two, three, four = results(program, *options, "--requests", "10", "--rounds", "1")
    assert [each["measure"] for each in alone] == ["alone", "alone"]
    assert all(each["bytes_per_s"] > 0 for each in alone)
    for each in (one, two, three, four):
        assert (each["measure"], each["requests"]) == ("validation", 10)
        for side in ("measured", "simulated"):
            assert 0 < each[side]["p50"] <= each[side]["p90"] <= each[side]["p99"]
        assert each["holds"] == all(abs(off) <= 0.2 for off in each["off"].values())
