# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/ttft.py` in a small form: it runs as documented and says what it measured. How fast it was is nobody's
test."""

import json
import os
import subprocess
import sys

import pytest

from harness.documented import REPOSITORY, documented
from harness.pool import ClusterPool, ReferencePool

ONE_CASE = ["--models", "small", "--pairs", "1/1", "--prompts", "128", "--rounds", "2", "--requests", "8", "--json"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_measures_each_side(cluster_pool: ClusterPool, reference_pool: ReferencePool) -> None:
    """Tokens of ours and of MooncakeConnector equal the single instance's, or the benchmark fails."""
    cluster_pool.stop()  # two cores carry no more than one
    reference_pool.stop()
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    _, program = documented("docs/performance.md", "python benchmarks/ttft.py")
    done = subprocess.run(
        [sys.executable, program, *ONE_CASE],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    measured = [(row["side"], row["measure"], row["failure"]) for row in rows]
    assert measured == [(side, what, "") for side in ("ours", "mooncake", "bare") for what in ("ttft", "load")]
    for row in rows:
        assert row["of_single"] == row["value"] / row["single"] > 0
        assert row["cpu_ms"] > 0
        assert row["single_cpu_ms"] > 0
