# SPDX-License-Identifier: Apache-2.0
"""benchmarks/proxy_overhead.py in a small form: it runs, says what it measured, and all streams get through."""

import json
import subprocess
import sys

from harness.documented import REPOSITORY, documented

STREAMS = 300


def test_measures_and_serves_many_streams_at_once() -> None:
    options = ["--requests", "3", "--rate", "40", "--seconds", "1", "--streams", str(STREAMS), "--json"]
    command = [sys.executable, *documented("docs/operations.md", "python benchmarks/proxy_overhead.py")[1:], *options]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    first_token, cpu, streams = (json.loads(line) for line in run.stdout.splitlines())
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
