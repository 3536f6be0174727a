# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/preemptions.py` in a small form: preempted streams go on rightly, beside vllm-ascend's own connector."""

import json
import subprocess
import sys

import pytest

from harness.documented import REPOSITORY
from harness.pool import ClusterPool, ReferencePool

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.long, pytest.mark.timeout(600)]


def test_ours_answers_rightly(cluster_pool: ClusterPool, reference_pool: ReferencePool) -> None:
    cluster_pool.stop()  # two cores carry no more than one
    reference_pool.stop()
    command = [sys.executable, "benchmarks/preemptions.py", "--rounds", "1", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (ours["side"], theirs["side"]) == ("ours", "layerwise")
    assert (ours["answers"], ours["wrong_length"], ours["wrong_tokens"], ours["failed"]) == (8, 0, 0, 0)
    assert min(ours["preemptions"], theirs["preemptions"]) > 0
    assert ours["compared"] > 0.5
