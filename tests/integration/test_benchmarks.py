# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run as documented: `benchmarks/run_all.sh` starts each, and proxies get all streams through one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.documented import REPOSITORY, documented

STREAMS = 300

pytestmark = pytest.mark.timeout(600)  # they start processes that import torch: minutes on a busy machine


def test_run_all_starts_every_benchmark(tmp_path: Path) -> None:
    """Python is a stand-in. A benchmark that fails, or whose environment is missing, fails the script."""
    script, quick = documented("docs/performance.md", "benchmarks/run_all.sh")
    programs = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in path.read_text()}

    def run(*options: str) -> tuple[int, str]:
        environment = {**os.environ, "VENV": str(tmp_path / "venv")}
        ran = subprocess.run(
            [script, *options], cwd=REPOSITORY, capture_output=True, text=True, env=environment, timeout=60
        )
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
    started = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    on_npu = {name for name in programs if '"--npu"' in (REPOSITORY / f"benchmarks/{name}.py").read_text()}
    assert {Path(program).stem for program, *options in started if "--npu" not in options} == programs
    assert {Path(program).stem for program, *options in started if "--npu" in options} == on_npu
    assert len(started) == len(programs) + len(on_npu)
    (tmp_path / "venv/bin/python").write_text("#!/usr/bin/env bash\nexit 3\n")
    status, said = run()
    assert status == 1
    assert "FAILED   push" in said
    assert run("--wrong")[0] == 2


@pytest.mark.long
def test_proxy_overhead() -> None:
    """All streams get through."""
    _, program = documented("docs/performance.md", "python benchmarks/proxy_overhead.py")
    options = ["--requests", "3", "--rate", "40", "--seconds", "1", "--streams", str(STREAMS), "--json"]
    command = [sys.executable, program, *options]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first_token, cpu, streams = map(json.loads, ran.stdout.splitlines())
    assert first_token["measure"] == "first token"
    assert all(first_token[way] > 0 for way in ("direct_ms", "proxy_ms", "of_direct"))
    assert first_token["added_ms"] == first_token["proxy_ms"] - first_token["direct_ms"]
    assert (cpu["measure"], cpu["asked"], cpu["failed"]) == ("cpu", 40, 0)
    assert cpu["share"] > 0
    assert cpu["ms_per_request"] > 0
    # None of them gets its second token before all have had the first, or else it fails.
    assert (streams["measure"], streams["streams"], streams["failed"]) == ("streams", STREAMS, 0)


@pytest.mark.long
def test_proxy_stalls() -> None:
    """Another client is answered meanwhile."""
    _, program = documented("docs/performance.md", "python benchmarks/proxy_stalls.py")
    command = [sys.executable, program, "--cases", "30,000", "--json"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [stall] = map(json.loads, ran.stdout.splitlines())
    assert (stall["measure"], stall["answers"], stall["others_failed"]) == ("stall", "400 x 1", 0)
    assert 0 < stall["stop_ms"] < 1000
    assert stall["others"] > 0


@pytest.mark.long
def test_attacks() -> None:
    """Honest requests end well meanwhile."""
    _, program = documented("docs/performance.md", "python benchmarks/attacks.py")
    command = [sys.executable, program, "--quick", "--rows", "releases that wait, with nothing", "--json"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [attack] = map(json.loads, ran.stdout.splitlines())
    assert (attack["measure"], attack["sent"]) == ("attack", 2000)
    assert attack["grown_mib"] < 64
    assert 0 < attack["during_ms"] <= attack["longest_ms"]
    assert attack["cpu_ms"] > 0
