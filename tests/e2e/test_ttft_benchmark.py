# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/ttft.py` in a small form: it runs as documented and says what it measured, or why it could not. How fast
it was is nobody's test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.documented import REPOSITORY, documented
from harness.pool import ClusterPool, ReferencePool

ONE_CASE = ["--models", "small", "--pairs", "1/1", "--prompts", "128", "--rounds", "2", "--requests", "8", "--json"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_measures_our_side_and_says_that_another_did_not_run(
    cluster_pool: ClusterPool, reference_pool: ReferencePool, tmp_path: Path
) -> None:
    cluster_pool.stop()  # two cores carry no more than one
    reference_pool.stop()
    (tmp_path / "nixl.py").write_text('raise ImportError("not on this machine")\n')
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    }
    _, program = documented("docs/performance.md", "python benchmarks/ttft.py")
    done = subprocess.run(
        [sys.executable, program, *ONE_CASE, "--sides", "nixl", "ours"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    nixl, ttft, load = map(json.loads, done.stdout.splitlines())
    assert (nixl["side"], nixl["measure"]) == ("nixl", "failure")
    assert "NIXL" in nixl["failure"]
    assert "DID NOT RUN" in done.stderr
    for row, measure in ((ttft, "ttft"), (load, "load")):
        assert (row["side"], row["measure"], row["failure"]) == ("ours", measure, "")
        assert row["of_single"] == row["value"] / row["single"] > 0
        assert row["cpu_ms"] > 0
        assert row["single_cpu_ms"] > 0
    assert (ttft["prompt"], ttft["rounds"]) == (128, 2)
