# SPDX-License-Identifier: Apache-2.0
"""benchmarks/descriptors.py: its bars hold against the installed vllm-ascend, for every model and size."""

import json
import subprocess
import sys

import pytest

from harness.documented import REPOSITORY, documented

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.timeout(600)]


def test_the_bars_hold() -> None:
    words = documented(
        "docs/performance.md",
        "CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/descriptors.py",
        {".venv-npu/bin/python": sys.executable},
    )
    done = subprocess.run(
        ["env", *words, "--tokens", "4096", "--json", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 4 * 5 * 3
    by_case = {(row["model"], row["sizes"], row["place"]): row for row in results}
    # 32 blocks of K and V. Of two ranks one writes 16 of each, which vllm-ascend's connector writes in halves.
    scattered = by_case["Qwen3-32B", "P8-D4", "scattered"]
    assert (scattered["ours"]["descriptors"], scattered["reference"]["descriptors"]) == (32, 64)
    assert scattered["ours"]["num_bytes"] == scattered["reference"]["num_bytes"] == 2 * 32 * 128 * 256
    assert by_case["Qwen3-32B", "P8-D4", "contiguous"]["ours"]["descriptors"] == 2
    assert by_case["DeepSeek-V3.1", "P8-D8", "contiguous"]["ours"]["descriptors"] == 2, "one rank of eight to each"
    assert by_case["Qwen3-32B", "P4-D8", "scattered"]["reference"] is None
