# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of moving KV on the emulated NPU: what benchmarks/push.py --npu counts is exact."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.documented import REPOSITORY, documented

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from helpers import push_counts
from helpers.push_pair import Cache

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.timeout(600)]

LAYERS = 4
CACHE = Cache(LAYERS, heads=2)  # a block of K or V: 64 KiB


def counts(prefill_tp: int, kernels: Path) -> list[push_counts.Count]:
    return list(push_counts.counts(CACHE, prefill_tp, mib=[2], requests=[1, 2], kernels=kernels))


def test_kv_that_decode_wants_as_it_is_costs_the_device_nothing(kernels: Path) -> None:
    for count in counts(1, kernels):
        assert (count.kernels, count.collectives, count.copies, count.passes) == (0, 0, 0, 0)
        assert (count.uploads, count.downloads, count.waits, count.allocated) == (0, 0, 0, 0)
        assert count.events == 1 + 1 / LAYERS  # and the step's end
        assert 1 / LAYERS <= count.calls <= 1, "one write for all requests, and for layers that wait"
        # K's and V's: one for each of 4 blocks, or for a request whose blocks lie together.
        assert count.descriptors == 2 * (4 if count.scattered else count.requests)
        assert count.holds


def test_regrouping_is_three_launches_a_layer_and_never_waits(kernels: Path) -> None:
    """A split, an all-to-all and an interleave, for all requests at once; the blocks' offsets are all that goes up."""
    for count in counts(2, kernels):
        assert (count.kernels, count.collectives, count.copies, count.passes) == (2, 1, 0, 2)
        assert (count.uploads, count.downloads, count.waits) == (1, 0, 0)
        assert 2 / LAYERS <= count.calls <= 2, "one of each rank, and for layers that wait"
        assert count.holds


IN_THIS = {".venv-npu/bin/python": sys.executable}


def results(words: list[str], *options: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["env", *words, *options, "--json"], cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
def test_push() -> None:
    words = documented("docs/performance.md", "CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/push.py --npu", IN_THIS)
    found = results(words, "--mib", "2", "--requests", "1", "--layers", "2", "--heads", "2")
    assert [(each["prefill_tp"], each["scattered"], each["holds"]) for each in found] == [
        (tp, scattered, True) for tp in (1, 2) for scattered in (False, True)
    ]


@pytest.mark.long
def test_overlap() -> None:
    """The model's thread is done long before the device is, and most bytes leave meanwhile."""
    words = documented(
        "docs/performance.md", "CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/overlap.py --npu", IN_THIS
    )
    [found] = results(words, "--mib", "4", "--layers", "8", "--heads", "2", "--rounds", "3", "--compute", "8")
    assert found["early"] >= 0.5
    assert found["queued_ms"] < 8 * found["compute_ms"]
