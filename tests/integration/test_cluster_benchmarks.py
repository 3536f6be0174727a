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


def test_simulate() -> None:
    """The documented clusters, with less traffic. Requests get through all of it, in its order."""
    commands = [
        documented("docs/simulator.md", "python benchmarks/simulate.py --loads"),
        documented("docs/simulator.md", "python benchmarks/simulate.py --clusters"),
        documented("docs/simulator.md", "python benchmarks/simulate.py --model"),
    ]
    for (_, program, *options), seconds in zip(commands, ("60", "30", "0.2"), strict=True):
        found = results(program, *options, "--seconds", seconds)
        assert found
        for each in found:
            assert (each["measure"], each["failed"]) == ("simulation", 0)
            assert each["requests"] > 0
            assert 0 < each["after_prefill"]["p50"] < each["ttft"]["p50"] <= each["ttft"]["p90"] <= each["ttft"]["p99"]
            assert 0 < each["early"] < 1
            for use in ("prefill_busy", "decode_busy", "p_link", "d_link"):
                assert 0 < each[use] <= 1
            assert each["advice"]["full_first"] in ("prefill", "decode")


@pytest.mark.long
def test_simulate_validation() -> None:
    """Real workers have moved all requests' KV; how near the simulator is depends on who else uses the machine."""
    _, program, *options = documented("docs/simulator.md", "python benchmarks/simulate.py --validate")
    *alone, one, two, three, four = results(program, *options, "--requests", "10", "--rounds", "1")
    assert [each["measure"] for each in alone] == ["alone", "alone"]
    assert all(each["bytes_per_s"] > 0 for each in alone)
    for each in (one, two, three, four):
        assert (each["measure"], each["requests"]) == ("validation", 10)
        for side in ("measured", "simulated"):
            assert 0 < each[side]["p50"] <= each[side]["p90"] <= each[side]["p99"]
        assert set(each["off"]) == {"p50", "p90", "p99", "after_prefill"}
        assert each["holds"] == all(abs(off) <= 0.2 for off in each["off"].values())
