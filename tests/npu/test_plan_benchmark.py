# SPDX-License-Identifier: Apache-2.0
"""benchmarks/plan.py on a few small steps: both sides do their work, in a process as a reader starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.documented import REPOSITORY, documented

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import plan
from helpers import plan_step

pytestmark = [pytest.mark.npu, pytest.mark.emulated, pytest.mark.timeout(600)]

SMALL = ["--layers", "3", "--rounds", "1", "--cases"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    words = documented(
        "docs/performance.md",
        "CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/plan.py",
        {".venv-npu/bin/python": sys.executable},
    )
    return subprocess.run(
        ["env", *words, *options], cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.long
def test_checks_bars_as_json() -> None:
    done = run(*SMALL, "2x5-scattered", "2x5-scattered-tp2", "--json", "--check")
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == ["2x5-scattered", "2x5-scattered-tp2"], done.stderr
    for result in results:
        assert result["layers"] == 3
        # K and V of two prompts of 5 blocks; a rank of two writes a half of the blocks, of which neighbours merge.
        assert result["descriptors"] == 2 * 2 * 5 or ("tp2" in result["case"] and result["descriptors"] <= 2 * 5)
        assert result["calls"] == 1
        assert result["quartiles"] == [result["times_less"]] * 2  # of the only round
        for side in ("ours", "reference"):
            assert min(result[side][part] for part in ("plan", "save", "send", "wall")) > 0
    misses = [miss for result in results for miss in result["misses"]]
    assert done.returncode == bool(misses)
    assert all(miss in done.stderr for miss in misses)


def test_a_side_that_writes_something_else_is_an_error() -> None:
    case = plan_step.Case.parse("1x1-scattered")
    size = case.block_bytes
    ours, reference = plan_step.Handed(), plan_step.Handed()
    for side, destinations in ((ours, [size, 2 * size]), (reference, [size, 3 * size])):
        side.batch_transfer_sync_write("", [0, size], destinations, [size, size])
        side.per_layer = [2]
    plan.check_same_bytes(case, ours, ours)
    with pytest.raises(RuntimeError, match="1 blocks differ"):
        plan.check_same_bytes(case, ours, reference)


def test_ranks_that_regroup_write_whole_blocks_where_the_reference_writes_a_part_of_each() -> None:
    case = plan_step.Case.parse("1x2-scattered-tp2")
    size = case.block_bytes
    ours, reference, wrong = plan_step.Handed(), plan_step.Handed(), plan_step.Handed()
    for side, destinations, length in ((ours, [4, 14], 2), (reference, [4, 6, 14, 16], 1), (wrong, [4, 17], 2)):
        lengths = [length * size] * len(destinations)
        side.batch_transfer_sync_write("", [0] * len(lengths), [size * place for place in destinations], lengths)
        side.per_layer = [len(lengths)]
    ours.per_layer = wrong.per_layer = [1]
    plan.check_same_bytes(case, ours, reference)
    with pytest.raises(RuntimeError, match="1 blocks differ"):
        plan.check_same_bytes(case, wrong, reference)


def test_a_side_that_writes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_step, "TIMEOUT_S", 0.1)
    with pytest.raises(RuntimeError, match="0 descriptors"):
        plan_step.Handed().wait(0)
