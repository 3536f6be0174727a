# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/ttft.py --npu` in a small form: vllm-ascend's own connectors run on the emulated CANN libraries as ours
does, and all give the single instance's tokens."""

import json
import subprocess
import sys

import pytest

from harness.documented import REPOSITORY, documented
from harness.pool import ClusterPool, ReferencePool

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.long, pytest.mark.timeout(900)]

ONE_CASE = ["--models", "small", "--pairs", "1/1", "--prompts", "128", "--rounds", "2", "--requests", "8", "--json"]


def test_all_sides_give_the_same_tokens(cluster_pool: ClusterPool, reference_pool: ReferencePool) -> None:
    cluster_pool.stop()  # two cores carry no more than one
    reference_pool.stop()
    words = documented(
        "docs/performance.md",
        "CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/ttft.py",
        {".venv-npu/bin/python": sys.executable},
    )
    done = subprocess.run(
        ["env", *words, *ONE_CASE], cwd=REPOSITORY, capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    measured = [(row["side"], row["measure"], row["failure"]) for row in rows]
    assert measured == [(side, what, "") for side in ("ours", "layerwise", "v1", "bare") for what in ("ttft", "load")]
    assert all(row["of_single"] == row["value"] / row["single"] > 0 for row in rows)
