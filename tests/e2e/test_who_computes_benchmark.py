# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/who_computes.py` in a small form: it runs as documented, and says what it measured. How fast it was is
nobody's test."""

import json
import os
import subprocess
import sys

import pytest

from harness.documented import REPOSITORY, documented
from harness.pool import ClusterPool, ReferencePool


@pytest.mark.long
@pytest.mark.timeout(900)
def test_measures_each_part(cluster_pool: ClusterPool, reference_pool: ReferencePool) -> None:
    """Answers of the ways that have equal prompts are equal, or it fails."""
    cluster_pool.stop()  # two cores carry no more than one
    reference_pool.stop()
    _, program = documented("docs/performance.md", "python benchmarks/who_computes.py")
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, program, "--quick", "--models", "small", "--json"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    compared = [(row["measure"], row["case"], row["against"]) for row in rows if row["bar"] is not None]
    assert compared == [
        *(("first token", f"{tokens} tokens", way) for tokens in (8, 32, 64) for way in ("alone", "direct")),
        *(("turns", "all", way) for way in ("alone", "direct")),
        ("output token", "4/s", "prefill"),
        ("load's TTFT", "4/s p50", "prefill"),
    ]
    for row in rows:
        assert row["ratio"] == row["auto_ms"] / row["other_ms"] > 0
        assert row["holds"] == (row["bar"] is None or row["ratio"] <= row["bar"])
