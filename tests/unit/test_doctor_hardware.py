# SPDX-License-Identifier: Apache-2.0
"""The verdicts of `doctor --hardware` on what its child processes say (tests/npu/test_doctor_hardware.py runs them)."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest

from vllm_ascend_pd.tools.doctor import collectives, hardware, kernels
from vllm_ascend_pd.tools.doctor.collectives import STAGES, RankReport, Reached
from vllm_ascend_pd.tools.doctor.finding import Level
from vllm_ascend_pd.tools.doctor.kernels import Compared
from vllm_ascend_pd.tools.doctor.progress import Progress
from vllm_ascend_pd.tools.doctor.tools import Ran


def rank(*stages: Reached, errors: bytes = b"") -> RankReport:
    report = RankReport()
    report.reached += stages
    report.errors += errors
    return report


def passed(count: int) -> list[Reached]:
    return [Reached(stage, seconds=0.5, num_bytes=1 << 20, rounds=3) for stage in STAGES[:count]]


def test_ranks_that_pass_all_stages() -> None:
    found = collectives.judge([rank(*passed(5)), rank(*passed(5))], "AIV", "")
    assert found.level is Level.OK
    assert found.figures["all_to_all_bytes_per_second"] == 2 << 20
    assert (found.figures["ranks"], found.figures["rounds"], found.figures["mode"]) == (2, 3, "AIV")


@pytest.mark.parametrize(
    ("ranks", "timed_out", "says", "action"),
    [
        ([rank(*passed(5)), rank(*passed(4))], "it hangs", "rank 1 at all-to-all beside all-reduce", "HOST"),
        ([rank(*passed(0)), rank(*passed(1))], "it hangs", "the model's group failed", "HCCL_IF_IP"),
        (
            [rank(*passed(4)), rank(*passed(2), errors=b"Segmentation fault")],
            "",
            "the process of rank 1 ended; .*Segm",
            "plog",
        ),
        ([rank(*passed(2), Reached(STAGES[2], problem="507035")), rank(*passed(3))], "", "rank 0: 507035", "plog"),
        (
            [rank(*passed(5)), rank(*passed(4), Reached(STAGES[4], problem="5 of 9 bytes are wrong"))],
            "",
            "rank 1: 5 of 9 bytes",
            "do not run prefill with tensor parallelism",
        ),
    ],
)
def test_ranks_that_do_not(ranks: list[RankReport], timed_out: str, says: str, action: str) -> None:
    found = collectives.judge(ranks, "AIV", timed_out)
    assert found.level is Level.ERROR
    assert re.search(says, found.found), found
    assert action in found.action


def compared(wrong: int = 0, fallback_wrong: int = 0, not_compiled: str = "") -> list[Compared]:
    return [
        Compared(op, row, 1 << 20, "Ascend910B1", not_compiled, wrong, fallback_wrong, 0.001, 0.002)
        for row in kernels.ROWS
        for op in ("gather_units", "split_heads", "interleave_heads")
    ]


def test_kernels() -> None:
    fine = kernels.judge(compared(), Ran("", ""))
    assert (fine.level, fine.figures["compiled"]) == (Level.OK, True)
    assert "9 cases on Ascend910B1" in fine.found
    assert fine.figures["gather_units_bytes_per_second"] == (1 << 20) * 1000
    slower = kernels.judge(compared(not_compiled="they were not built"), Ran("", ""))
    assert (slower.level, slower.figures["compiled"]) == (Level.WARNING, False)
    assert "not in use (they were not built)" in slower.found
    wrong = kernels.judge(compared(wrong=7), Ran("", ""))
    assert wrong.level is Level.ERROR
    assert "7 of 1048576 bytes of gather_units differ" in wrong.found
    assert "of torch's operators differ" in kernels.judge(compared(fallback_wrong=7), Ran("", "")).found
    crashed = kernels.judge(compared()[:4], Ran("", "aicore exception", "was ended by SIGABRT"))
    assert crashed.level is Level.ERROR
    assert "was ended by SIGABRT, after 4 ops: aicore exception" in crashed.found


def test_what_a_library_prints_when_imported_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("print('a banner')\nraise ImportError('no CANN here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = anyio.run(kernels.check, 60.0)
    assert found.level is Level.ERROR
    assert "ImportError: no CANN here" in found.found


def test_ways_name_npus_as_the_machine_counts_them() -> None:
    checks = [way.check for way in hardware.ways(["4", "5", "6", "7"], "192.0.2.1")]
    assert checks == ["hardware.write.ascend.4-5", "hardware.write.ascend.4-7", "hardware.write.roce.7-4"]
    assert [(way.source, way.destination) for way in hardware.ways(["4", "5"], "h")] == [(0, 1), (1, 0)]


def test_without_torch_npu_nothing_is_tried() -> None:
    [finding] = anyio.run(hardware.check, [], "127.0.0.1", Progress(), 1.0)
    assert (finding.check, finding.level) == ("hardware.devices", Level.ERROR)
    assert "torch_npu is not installed" in finding.found
    assert "requirements/npu.txt" in finding.action
