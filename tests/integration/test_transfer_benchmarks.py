# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of moving KV, in small forms, as in `test_benchmarks.py`."""

import pytest
from benchmark_results import results

from harness.documented import documented

pytestmark = pytest.mark.timeout(600)  # they start processes that import torch: minutes on a busy machine


@pytest.mark.long
def test_push() -> None:
    """The bytes of each side are compared on arrival before it is measured."""
    _, program = documented("docs/performance.md", "python benchmarks/push.py")
    small = ["--mib", "2", "--layers", "2", "--heads", "1", "--rounds", "1"]
    found = results(program, *small, "--requests", "1", "8")
    cases = [(each["requests"], each["scattered"], each["descriptor_kib"]) for each in found]
    assert cases == [(1, False, 256), (1, True, 32), (8, False, 64), (8, True, 32)]
    for each in found:
        assert all(each[side] > 0 for side in ("ours", "cold", "best", "same", "tcp"))
        assert each["of_best"] == pytest.approx(each["ours"] / each["best"])  # of the only round
        assert each["of_same"] == pytest.approx(each["ours"] / each["same"])


@pytest.mark.long
def test_overlap() -> None:
    _, program = documented("docs/performance.md", "python benchmarks/overlap.py")
    small = ["--mib", "2", "--layers", "4", "--heads", "1", "--rounds", "2"]
    found = results(program, *small, "--compute", "2", "0.5")
    assert [(each["wanted"], each["early_bar"]) for each in found] == [(2.0, 0.5), (0.5, 0.5)]
    for each in found:
        assert 0 <= each["early"] < 1  # the last layer's bytes are never early
        assert min(each[time] for time in ("compute_ms", "push_ms", "after_ms", "bulk_after_ms")) > 0
        assert each["bulk_after_ms"] == 4 * each["push_ms"]
        assert each["ratio"] == each["compute_ms"] / each["push_ms"]
        judged = each["early"] >= each["early_bar"] and each["after_ms"] < each["after_bar_ms"]
        assert each["holds"] == (judged or each["ratio"] < 1)


def test_memory() -> None:
    """The ring has the size that the code computes, on real ranks too. It follows the step's tokens, not the cache."""
    _, program = documented("docs/performance.md", "python benchmarks/memory.py")
    real, *found = results(program)
    assert len(found) == 2 * 2 * 3
    assert real["registered"] == [real["predicted"]] * 2
    for each in found:
        assert each["slots"] == (4 if each["step_tokens"] <= 8192 else 2)
        ring = each["slots"] * (each["step_tokens"] + 2 * 128) * 2 * 128 * each["heads"] * 2
        assert each["ours"] == -(-ring // 2**21) * 2**21
        layers = {"Llama-3.1-70B": 80, "Qwen3-235B-A22B": 94}[each["model"]]
        assert each["cache"] - 2**26 < layers * each["reference"] <= each["cache"]
        assert each["less"] == each["reference"] / each["ours"]
