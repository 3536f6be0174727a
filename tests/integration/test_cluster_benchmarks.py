# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of many requests and engines, in small forms, as in `test_benchmarks.py`."""

import pytest
from benchmark_results import results

from harness.documented import documented

pytestmark = pytest.mark.timeout(600)  # they start processes that import torch: minutes on a busy machine


@pytest.mark.long
def test_scale() -> None:
    """Every request of every wave ends well on both sides, or it fails."""
    _, program = documented("docs/performance.md", "python benchmarks/scale.py")
    sizes = ["--requests", "1", "8", "--engines", "1", "3", "--at", "4", "--rounds", "1", "--layers", "3"]
    *found, known = results(program, *sizes)
    waves = [each for each in found if each["measure"] == "wave"]
    assert [(each["requests"], each["engines"], each["spread"]) for each in waves] == [
        (1, 1, False),
        (8, 1, False),
        (4, 1, False),
        (4, 3, False),
        (4, 3, True),
    ]
    for each in waves:
        assert each["posts"] == 1
        assert each["messages"] >= 4, "a grant and a report, each with its answer"
        assert min(each[name] for name in each if name[:2] in ("p_", "d_")) > 0
    growths = [each for each in found if each["measure"] == "growth"]
    assert {(each["smaller"]["engines"], each["larger"]["engines"]) for each in growths} == {(1, 1), (1, 3)}
    assert all(each["times"] > 0 for each in growths)
    assert known["measure"] == "known engine"
    assert min(known["bytes"].values()) > 0
